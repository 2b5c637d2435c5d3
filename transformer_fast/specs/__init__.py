"""The op table: what tests, benchmarks, comparisons and documents iterate over."""

from .attention import ATTENTION
from .cross_entropy import CROSS_ENTROPY, LINEAR_CROSS_ENTROPY
from .feed_forward import FEED_FORWARD
from .layer_norm import ADD_LAYER_NORM, ADD_RMS_NORM, LAYER_NORM, RMS_NORM
from .linear import LINEAR
from .spec import Case, OpSpec

OPS: dict[str, OpSpec] = {
    spec.name: spec
    for spec in (
        LAYER_NORM,
        ADD_LAYER_NORM,
        RMS_NORM,
        ADD_RMS_NORM,
        ATTENTION,
        LINEAR,
        FEED_FORWARD,
        CROSS_ENTROPY,
        LINEAR_CROSS_ENTROPY,
    )
}

__all__ = ["OPS", "Case", "OpSpec"]
