"""Rewriting the graphs of hand-written Transformers: the backend of `torch.compile`.

`backend.compile_backend` is the entry; `rewrite.rewrite` lists what is done, one file each.
"""
