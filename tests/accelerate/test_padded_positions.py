"""accelerate on models whose own code reads outputs at padded positions, and ``skip_padding=False``."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from accelerate_checks import form
from module_checks import assert_same_numbers
from torch import Tensor

from transformer_fast import accelerate, restore
from transformer_fast.accelerate import packing, padded_positions, private_names

pytest.importorskip(
    "transformers", reason="transformers is not installed (pip install transformer_fast[test])"
)
import transformers
from test_packing import (
    _BOTH,
    _DEBERTA,
    _ENCODER,
    _T5,
    ENCODERS,
    LEFT,
    MIXED,
    PACKED,
    RIGHT,
    build,
    build_decoder,
    inputs_of,
    stack_of,
)
from transformers.models.bert import modeling_bert as bert

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.sampled(12, 25),
    pytest.mark.usefixtures("quiet_transformers"),
]

_SIZES = {
    **_BOTH, **_ENCODER, "embedding_size": 16, "dim": 32, "hidden_dim": 48, "n_layers": 3, "n_heads": 4,
    "num_labels": 3, "mask_token_id": 5,
}  # fmt: skip
_SOUND = {
    **_ENCODER, "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
}  # fmt: skip
FAMILIES = (
    "Albert", "Bert", "Camembert", "DebertaV2", "DistilBert", "Electra", "Esm", "ModernBert",
    "MPNet", "Roberta", "RobertaPreLayerNorm", "XLMRoberta",
)  # fmt: skip


def head(name: str, **settings: Any) -> Any:
    """Returns a model with random weights and without dropout."""
    kind = getattr(transformers, name)
    given = _DEBERTA if name.startswith("Deberta") else _T5 if "T5" in name else {}
    names = {*kind.config_class().to_dict(), *kind.config_class.attribute_map, "num_labels"}
    torch.manual_seed(0)
    sizes = {key: x for key, x in {**_SIZES, **given, **settings}.items() if key in names}
    config = kind.config_class(**sizes)
    for key, value in list(vars(config).items()):
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    return kind(config).eval()


class Outputs(torch.nn.Module):
    """Returns one output of a model."""

    def __init__(self, model: Any, wanted: str) -> None:
        super().__init__()
        self.model, self.wanted = model, wanted

    def forward(self, **inputs: Tensor) -> Tensor:
        found: Tensor = self.model(**inputs)[self.wanted]
        return found


def check(model: Any, inputs: dict[str, Tensor], wanted: str, grad: bool = True) -> Any:
    """Asserts that an output is transformers', in inference and in training; returns our model."""
    theirs = Outputs(model, wanted)
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    assert_same_numbers(ours.eval(), theirs.eval(), (), inputs, grad=False)
    if grad:
        assert_same_numbers(ours.train(), theirs.train(), (), inputs, grad=True)
    return ours


@pytest.mark.parametrize("family", FAMILIES)
def test_classifiers_read_the_first_position(family: str, rows: list[int]) -> None:
    model = head(f"{family}ForSequenceClassification")
    ours = check(model, inputs_of(*LEFT), "logits")
    assert not rows
    with torch.no_grad():
        ours.eval()(**inputs_of(*RIGHT))
    assert rows


def test_five_labels_are_no_positions(rows: list[int]) -> None:
    check(head("BertForSequenceClassification", num_labels=5), inputs_of(*RIGHT), "logits")
    assert rows


def test_special_tokens_outside_the_vocabulary_are_not_used(rows: list[int]) -> None:
    """ModernBERT's config has such defaults if only ``vocab_size`` is given."""
    model = head("ModernBertForSequenceClassification", eos_token_id=50282)
    check(model, inputs_of(*RIGHT), "logits")
    assert rows


def labels_of(inputs: dict[str, Tensor], padding: int, labels: int = 3) -> dict[str, Tensor]:
    mask = inputs["attention_mask"]
    found = torch.randint(0, labels, mask.shape, generator=torch.Generator().manual_seed(5))
    return {**inputs, "labels": found.masked_fill(mask == 0, padding)}


@pytest.mark.sampled(12, 25)
@pytest.mark.parametrize("padding", [-100, 0])
@pytest.mark.parametrize("task", ["TokenClassification", "MaskedLM"])
@pytest.mark.parametrize("family", FAMILIES)
def test_labels_at_padded_positions_count(
    family: str, task: str, padding: int, rows: list[int]
) -> None:
    if not hasattr(transformers, f"{family}For{task}"):
        pytest.skip("transformers has no such class")
    model = head(f"{family}For{task}")
    check(model, labels_of(inputs_of(*RIGHT), padding), "loss")
    assert bool(rows) == (padding == -100)


@pytest.mark.parametrize("real", [RIGHT, LEFT])
@pytest.mark.parametrize("padding", [-100, 2])
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "OPTForCausalLM"])
def test_labels_of_decoders(
    name: str, padding: int, real: tuple[str, ...], rows: list[int]
) -> None:
    """With padding on the left, the label of the last padded position is the first real token."""
    check(build_decoder(name), labels_of(inputs_of(*real), padding), "loss")
    assert bool(rows) == (padding == -100 and real is RIGHT)


@pytest.mark.parametrize("real", [RIGHT, LEFT])
@pytest.mark.parametrize("name", ["GPT2ForTokenClassification", "LlamaForTokenClassification"])
def test_labels_of_tokens_of_decoders(name: str, real: tuple[str, ...], rows: list[int]) -> None:
    check(build_decoder(name, num_labels=3), labels_of(inputs_of(*real), 0), "loss")
    assert not rows


@pytest.mark.parametrize(
    "name", ["GPT2ForSequenceClassification", "LlamaForSequenceClassification"]
)
def test_classifiers_of_decoders(name: str, rows: list[int]) -> None:
    """Classifiers find the last real token by the id of padding, not by the mask."""
    model = build_decoder(name, num_labels=3)
    for real in (RIGHT, LEFT):
        inputs = inputs_of(*real)
        check(model, inputs, "logits")
        assert len(rows) == 3
        others = {
            **inputs,
            "input_ids": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, 7),
        }
        check(model, others, "logits")
        assert len(rows) == 3
        del rows[:]
    states = torch.randn(4, 9, 32, generator=torch.Generator().manual_seed(1))
    given = {"inputs_embeds": states, "attention_mask": inputs_of(*RIGHT)["attention_mask"]}
    check(model, given, "logits", grad=False)
    assert not rows


@pytest.mark.parametrize("family", ["Bert", "DistilBert", "MPNet"])
def test_answers_are_sought_at_all_positions(family: str, rows: list[int]) -> None:
    model = head(f"{family}ForQuestionAnswering", num_labels=2)
    inputs = inputs_of(*RIGHT)
    ours = check(model, inputs, "start_logits")
    answers = {
        "start_positions": torch.tensor([1, 2, 0, 3]),
        "end_positions": torch.tensor([2, 4, 1, 3]),
    }
    check(model, {**inputs, **answers}, "loss")
    assert not rows
    report = accelerate(ours.model)
    assert "compared with each other" in stack_of(report).reason
    assert not any("zeros" in note for note in report.notes)


@pytest.mark.parametrize("name", ["HubertForCTC", "Wav2Vec2ForCTC"])
def test_decoding_reads_all_frames(name: str, rows: list[int]) -> None:
    model = head(name, **_SOUND)
    mask = torch.ones(2, 400, dtype=torch.long)
    mask[1, 200:] = 0
    sound = torch.randn(2, 400, generator=torch.Generator().manual_seed(3)) * mask
    ours = check(model, {"input_values": sound, "attention_mask": mask}, "logits")
    labels = torch.tensor([[3, 4, 5], [6, 7, -100]])
    inputs = {"input_values": sound, "attention_mask": mask, "labels": labels}
    model.config.ctc_zero_infinity = True
    check(model, inputs, "loss")
    assert not rows
    assert "no mask of the positions" in stack_of(accelerate(ours.model)).reason
    with torch.no_grad():
        ours.eval().model.base_model(sound, attention_mask=mask)
    assert rows


@pytest.mark.parametrize("name", ["MultipleChoice", "NextSentencePrediction", "PreTraining"])
def test_other_heads_of_bert(name: str, rows: list[int]) -> None:
    model = head(f"BertFor{name}")
    wanted = {"PreTraining": "seq_relationship_logits"}.get(name, "logits")
    for real in (RIGHT, LEFT):
        inputs = inputs_of(*real)
        if name == "MultipleChoice":
            inputs = {key: x.view(2, 2, -1) for key, x in inputs.items()}
        check(model, inputs, wanted)
        assert bool(rows) == (real is RIGHT)
        del rows[:]


def test_siglip_pools_the_last_position(rows: list[int]) -> None:
    model = build("SiglipTextModel")
    for real in (RIGHT, LEFT, MIXED):
        check(model, inputs_of(*real), "pooler_output", grad=False)
    assert not rows
    assert "at the right, which SiglipTextModel reads" in stack_of(accelerate(model)).reason


@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "T5ForConditionalGeneration"])
def test_encoders_of_translators(name: str, rows: list[int]) -> None:
    """Labels belong to the decoder's positions, even if the encoder has the same number of positions."""
    inputs = labels_of(inputs_of(*RIGHT), 7)
    model = head(name)
    model.config.decoder_start_token_id = 0
    check(model, inputs, "loss")
    assert rows


class LastAndMean(bert.BertPreTrainedModel):
    """A head of a user, which reads padded positions in its own way."""

    def __init__(self, config: Any, last: bool) -> None:
        super().__init__(config)
        self.bert, self.last = bert.BertModel(config), last
        self.post_init()

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **given: Any) -> Any:
        x = self.bert(input_ids, attention_mask, **given).last_hidden_state
        return {"pooled": x[:, -1] if self.last else x.mean(1)}


@pytest.mark.parametrize("last", [True, False])
def test_heads_of_users(last: bool, rows: list[int]) -> None:
    model = LastAndMean(transformers.BertConfig(**_ENCODER), last).eval()
    for real in (RIGHT, LEFT, MIXED):
        check(model, inputs_of(*real), "pooled", grad=False)
    assert not rows


class Asking(bert.BertPreTrainedModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert = bert.BertModel(config)
        self.post_init()

    def forward(self, input_ids: Any, attention_mask: Any, more: Any) -> Any:
        return {"pooled": self.bert(input_ids, attention_mask).last_hidden_state[:, 0] + more}


def test_models_without_a_trial_compute_all_positions(rows: list[int]) -> None:
    model = Asking(transformers.BertConfig(**_ENCODER)).eval()
    check(model, {**inputs_of(*RIGHT), "more": torch.ones(32)}, "pooled", grad=False)
    assert not rows
    reason = stack_of(accelerate(model)).reason
    assert "padded positions are computed: Asking: a trial call failed (TypeError" in reason


def test_labels_of_several_sequences_a_row() -> None:
    """GPT2DoubleHeadsModel takes (B, choices, T)."""
    inputs = {key: x.view(2, 2, -1) for key, x in labels_of(inputs_of(*RIGHT), 2).items()}
    ends = torch.tensor([[4, 8], [1, 7]])
    model = build_decoder("GPT2DoubleHeadsModel")
    check(model, {**inputs, "mc_token_ids": ends}, "loss", grad=False)
    real = inputs_of(*RIGHT)["attention_mask"] == 1
    for labels in (inputs["labels"], inputs["labels"].flatten(0, 1)):
        assert padded_positions._has_labels_at_padding(labels, real, True)
    assert not padded_positions._has_labels_at_padding(inputs["labels"][:1], real, True)


def test_a_forward_of_the_instance_may_read_anything(rows: list[int]) -> None:
    model = head("BertForSequenceClassification")
    model.forward = model.forward
    assert (
        "forward of BertForSequenceClassification was replaced"
        in stack_of(accelerate(model)).reason
    )
    with torch.no_grad():
        model(**inputs_of(*RIGHT))
    assert not rows


class Sealed(LastAndMean):
    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise RuntimeError("sealed")


def test_models_that_cannot_be_subclassed_compute_all_positions(rows: list[int]) -> None:
    model = Sealed(transformers.BertConfig(**_ENCODER), True).eval()
    as_it_was = form(model)
    check(model, inputs_of(*RIGHT), "pooled", grad=False)
    assert not rows
    assert "Sealed cannot be subclassed: sealed" in stack_of(accelerate(model)).reason
    restore(model)
    assert form(model) == as_it_was


# skip_padding


@pytest.mark.parametrize("name", [*PACKED, "GPT2LMHeadModel", "LlamaForCausalLM"])
def test_without_skip_padding_all_positions_are_computed(name: str, rows: list[int]) -> None:
    theirs = build(name) if name in ENCODERS else build_decoder(name)
    ours = copy.deepcopy(theirs)
    report = accelerate(ours, skip_padding=False)
    assert "padded positions are computed (skip_padding=False)" in stack_of(report).reason
    assert not any("zeros" in note for note in report.notes)
    for real in (RIGHT, MIXED):
        with torch.no_grad():
            found, right = (m(**inputs_of(*real))[0] for m in (ours, theirs))
        torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-3)
    assert not rows


@pytest.mark.parametrize("name", ["BertModel", "MPNetModel", "LlamaForCausalLM"])
def test_the_last_call_decides(name: str, rows: list[int]) -> None:
    model = build(name) if name in ENCODERS else build_decoder(name)
    as_it_was = form(model)
    inputs = inputs_of(*RIGHT)
    accelerate(model)
    for skips in (False, True, True, False):
        report = accelerate(model, skip_padding=skips)
        assert not report.swapped
        note = padded_positions.SKIPPED if skips else "padded positions are computed"
        assert note in stack_of(report).reason
        for each in (model, copy.deepcopy(model)):
            with torch.no_grad():
                each(**inputs)
            assert bool(rows) is skips
            del rows[:]
    assert type(pickle.loads(pickle.dumps(model))) is type(
        build(name) if name in ENCODERS else build_decoder(name)
    )
    restore(model)
    assert form(model) == as_it_was
    with pytest.raises(TypeError, match="skip_padding must be True or False, not 'no'"):
        accelerate(model, skip_padding="no")  # type: ignore[arg-type]
    assert form(model) == as_it_was


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        "BertForSequenceClassification",
        "BertForTokenClassification",
        "MPNetForSequenceClassification",
    ],
)
def test_models_keep_their_interface(
    name: str, skips: bool, rows: list[int], tmp_path: Any
) -> None:
    theirs = head(name)
    as_it_was = form(theirs)
    ours = copy.deepcopy(theirs)
    report = accelerate(ours, verify=inputs_of(*LEFT), skip_padding=skips)
    assert report.verified, str(report)
    assert inspect.signature(ours.forward) == inspect.signature(theirs.forward)
    assert type(ours).__name__ == name
    assert type(pickle.loads(pickle.dumps(ours))) is type(theirs)
    ours.save_pretrained(tmp_path)
    assert type(type(theirs).from_pretrained(tmp_path)) is type(theirs)
    with pytest.raises(ValueError, match="specify"):
        ours()
    assert padded_positions._running.get() is None
    names = restore(ours)
    assert len(names) == len(report.swapped)
    assert form(ours) == as_it_was


def test_the_trial_leaves_no_trace() -> None:
    model = head("BertForSequenceClassification").train()
    model.bert.embeddings.register_forward_hook(lambda *_: pytest.fail("a hook was called"))
    model.classifier.register_forward_pre_hook(lambda *_: pytest.fail("a hook was called"))
    state, flags = torch.random.get_rng_state(), [m.training for m in model.modules()]
    report = accelerate(model)
    assert padded_positions.SKIPPED in stack_of(report).reason
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [m.training for m in model.modules()] == flags
    assert len(model.bert.embeddings._forward_hooks) == 1
    assert len(model.classifier._forward_pre_hooks) == 1


# The report, and newer versions of transformers.


@pytest.mark.parametrize("name", ["BertModel", "DebertaV2Model", "LlamaForCausalLM"])
def test_the_report_says_that_padding_is_skipped(name: str) -> None:
    report = accelerate(build(name) if name in ENCODERS else build_decoder(name))
    assert padded_positions.SKIPPED in stack_of(report).reason, (name, stack_of(report).reason)
    assert sum("padded positions are zeros" in note for note in report.notes) == 1
    assert "skip_padding=False" in str(report)


def test_the_report_says_which_argument_keeps_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "CACHES", ())
    reason = stack_of(accelerate(build_decoder("LlamaForCausalLM"))).reason
    assert "padded positions are computed: its layers get" in reason
    assert "=DynamicCache, which has no form for rows" in reason


def test_private_names_exist() -> None:
    for module, names in private_names.OBJECTS.items():
        for name in names:
            assert private_names.load(module, name) is not None
    for name in private_names.OF_MODELS:
        assert hasattr(transformers.PreTrainedModel, name)
    config = transformers.BertConfig(**_ENCODER, attn_implementation="eager")
    assert getattr(config, private_names.NAME_OF_ATTENTION) == "eager"
    layer = llama_layer()
    assert any(name in inspect.signature(layer.forward).parameters for name in private_names.CACHES)


def llama_layer() -> Any:
    return build_decoder("LlamaForCausalLM").model.layers[0]
