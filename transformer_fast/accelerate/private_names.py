"""The private names of transformers that this package uses; a test looks each one up.

A new version of transformers may rename them. Layers that pass a tensor under a name missing here are
called on padded batches, or are left unchanged, and the report says so.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

#: Logits processors that search the vocabulary for their tokens.
SEARCHING = (
    "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor",
)  # fmt: skip
#: Logits processors that treat rows independently, and run no code of users.
STATELESS = (
    *SEARCHING, "ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor",
    "InfNanRemoveLogitsProcessor", "LogitNormalization", "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor", "RepetitionPenaltyLogitsProcessor", "SequenceBiasLogitsProcessor",
)  # fmt: skip
#: Module -> names in it.
OBJECTS: dict[str, tuple[str, ...]] = {
    "transformers.activations": (
        "AccurateGELUActivation", "FastGELUActivation", "GELUActivation", "GELUTanh",
        "NewGELUActivation", "SiLUActivation",
    ),
    "transformers.cache_utils": ("DynamicCache", "DynamicLayer", "EncoderDecoderCache"),
    "transformers.generation": ("GenerationMixin",),
    "transformers.generation.logits_process": ("LogitsProcessorList", *STATELESS),
    "transformers.generation.stopping_criteria": ("EosTokenCriteria", "MaxLengthCriteria"),
    "transformers.integrations.sdpa_attention": ("sdpa_attention_forward",),
    "transformers.masking_utils": (
        "and_masks", "bidirectional_mask_function", "causal_mask_function", "sdpa_mask",
        "sliding_window_bidirectional_overlay", "sliding_window_overlay",
    ),
    "transformers.modeling_layers": ("GradientCheckpointingLayer",),
    "transformers.modeling_utils": ("ALL_ATTENTION_FUNCTIONS", "PreTrainedModel"),
    "transformers.pytorch_utils": ("Conv1D",),
    "transformers.quantizers.base": ("HfQuantizer",),
    "transformers.utils.output_capturing": ("_active_collector",),
}  # fmt: skip
#: Attributes of every model.
OF_MODELS = ("_can_set_attn_implementation", "base_model", "main_input_name")
#: Attribute of a config that names the attention function.
NAME_OF_ATTENTION = "_attn_implementation_internal"

#: Attributes of layers: if calls with gradients are checkpointed, and the function that does it.
CHECKPOINTING = ("gradient_checkpointing", "_gradient_checkpointing_func")

# Arguments of layers.

#: The mask.
MASK = "attention_mask"
#: The encoder's output (B, S, M), and its mask: arguments of the decoder and of its layers.
MEMORY, MEMORY_MASK = "encoder_hidden_states", "encoder_attention_mask"
#: Biases of relative positions of self-attention and of attention to the encoder's output.
BIAS, MEMORY_BIAS = "position_bias", "encoder_decoder_position_bias"
#: Cosines and sines of rotary position embeddings.
ROTATION = "position_embeddings"
#: Keys and values of earlier calls; "cache" from transformers 5.24 on.
CACHES = ("cache", "past_key_values", "layer_past")
#: Arguments that depend on the positions of tokens and that only attention reads.
OF_POSITIONS = (BIAS, "relative_pos", "rel_embeddings")

# Arguments of models.

#: Integer arguments (B, T) that are not labels.
NO_LABELS = frozenset({
    MASK, "bbox", "cache_position", "input_ids", "position_ids", "token_type_ids",
})  # fmt: skip
#: Label value that the loss ignores.
IGNORED_LABEL = -100


def load(module: str, name: str) -> Any:
    """Returns an object of `OBJECTS`."""
    assert name in OBJECTS[module]
    return getattr(importlib.import_module(module), name)


# Plain imports, because Dynamo traces these functions and cannot trace `load`.


def sdpa_mask() -> Any:
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask


def sdpa_attention() -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward


def attention_functions() -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS


def arguments(function: Any) -> list[str]:
    """Returns the names of a function's parameters; each name in `CACHES` becomes the first one."""
    names = inspect.signature(function).parameters
    return [CACHES[0] if name in CACHES else name for name in names]
