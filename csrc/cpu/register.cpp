#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(transformer_fast, m) { (void)m; }
