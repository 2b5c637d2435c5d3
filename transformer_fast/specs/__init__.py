"""The op table: one `OpSpec` per op, which tests, benchmarks, `compare` and the docs iterate over."""

from .. import reference
from . import attention, cross_entropy, feed_forward, int8_linear, layer_norm, linear
from .spec import Case, OpSpec

_SPECS = {
    spec.name: spec
    for module in (attention, cross_entropy, feed_forward, int8_linear, layer_norm, linear)
    for spec in vars(module).values()
    if isinstance(spec, OpSpec)
}
OPS: dict[str, OpSpec] = {op: _SPECS[op] for op in reference.OPS}

__all__ = ["OPS", "Case", "OpSpec"]
