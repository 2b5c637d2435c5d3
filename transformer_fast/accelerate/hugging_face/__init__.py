"""Models of Hugging Face's transformers library, without importing it before the user does.

`models` says which are known; `attention` is what their attention registry calls, and `registry`
finds out who looks into it; `layers` has the classes their layers are swapped to.
"""
