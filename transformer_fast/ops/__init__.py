"""The operators of `torch.ops.transformer_fast` and their autograd, one file per op.

A backend adds an overload per operator and gets from ``<op>_on(backend)`` the function that the
dispatcher runs. Nothing here chooses a backend or checks arguments.
"""
