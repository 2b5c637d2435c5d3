"""Translates a text file, line by line, with a model of transformers on the CPU.

Lines of similar length make up a batch, and the output has the order of the input. A part of the file
is translated before and after `transformer_fast.accelerate`, to show what it gains.

    python examples/translate.py --model Helsinki-NLP/opus-mt-en-de --text in.txt --out out.txt
    python examples/translate.py --make --text README.md --out out.txt

`--model` is a folder or a name of the Hugging Face hub: Marian, NLLB, M2M100, T5, BART and others that
`AutoModelForSeq2SeqLM` loads. NLLB needs `--source eng_Latn --target deu_Latn`, T5 needs `--prefix
"translate English to German: "`. `--make` makes a small model with random weights instead, whose
translations are meaningless: it shows that the example runs.

Needs transformers: pip install transformers
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import transformer_fast


def make_model(path: Path, lines: Sequence[str]) -> None:
    """Saves a small BART with random weights, and a tokenizer that is trained on the lines."""
    from tokenizers import ByteLevelBPETokenizer

    words = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    words.train_from_iterator(lines, 2000, special_tokens=special, show_progress=False)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words._tokenizer, bos_token="<s>", pad_token="<pad>", eos_token="</s>",
        unk_token="<unk>",
    )  # fmt: skip
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=len(tokenizer), d_model=128, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=256,
        decoder_ffn_dim=256,
    )  # fmt: skip
    for part in (tokenizer, transformers.BartForConditionalGeneration(config)):
        part.save_pretrained(path)


class Translator:
    """A model and its tokenizer, loaded from a folder or from the hub."""

    def __init__(self, path: str, options: argparse.Namespace) -> None:
        languages = {"src_lang": options.source} if options.source else {}
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path, **languages)
        self.model: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(path).eval()
        self.prefix, self.batch = options.prefix, options.batch
        self.settings = {"num_beams": options.beams, "max_new_tokens": options.tokens}
        if options.target:
            first = self.tokenizer.convert_tokens_to_ids(options.target)
            self.settings["forced_bos_token_id"] = first

    def batches(self, lines: Sequence[str]) -> Iterator[list[int]]:
        """Yields places of lines of similar length, the longest first: they need most memory."""
        places = sorted(
            (place for place, line in enumerate(lines) if line.strip()),
            key=lambda place: -len(self.tokenizer(lines[place]).input_ids),
        )
        for start in range(0, len(places), self.batch):
            yield places[start : start + self.batch]

    def __call__(self, lines: Sequence[str], shows: bool = True) -> tuple[list[str], float]:
        """Returns the translations, "" for empty lines, and the new tokens a second."""
        found, tokens, done = [""] * len(lines), 0, 0
        start = time.perf_counter()
        for places in self.batches(lines):
            given = self.tokenizer(
                [self.prefix + lines[place] for place in places], return_tensors="pt",
                padding=True, truncation=True,
            )  # fmt: skip
            given.pop("token_type_ids", None)
            new = self.model.generate(**given, **self.settings)
            tokens += int((new[:, 1:] != self.tokenizer.pad_token_id).sum())
            texts = self.tokenizer.batch_decode(new, skip_special_tokens=True)
            for place, text in zip(places, texts, strict=True):
                found[place] = " ".join(text.split())
            done += len(places)
            if shows:
                rate = tokens / (time.perf_counter() - start)
                print(f"\r{done} lines, {rate:.0f} tokens a second", end="", file=sys.stderr)
        if shows:
            print(file=sys.stderr)
        return found, tokens / max(time.perf_counter() - start, 1e-9)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--text", type=Path, required=True, help="UTF-8, a sentence a line")
    parser.add_argument("--out", type=Path, required=True, help="file of the translations")
    models = parser.add_mutually_exclusive_group(required=True)
    models.add_argument("--model", help="folder, or name on the hub")
    models.add_argument("--make", action="store_true", help="make a model with random weights")
    parser.add_argument("--prefix", default="", help="text before each line (T5)")
    parser.add_argument("--source", help="language of the text (NLLB, M2M100, mBART)")
    parser.add_argument("--target", help="token of the language to translate to")
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="lines")
    parser.add_argument("--tokens", type=int, default=128, help="most new tokens of a line")
    parser.add_argument("--float32", action="store_true", help="instead of int8")
    parser.add_argument("--sample", type=int, default=16, help="lines to compare the speed with")
    options = parser.parse_args(arguments)
    lines = options.text.read_text("utf-8").splitlines()
    sample = [line for line in lines if line.strip()][: options.sample]
    if not sample:
        parser.error(f"argument --text: {options.text} has no text")
    path = options.model
    if options.make:
        path = str(options.out.parent / "made_translator")
        make_model(Path(path), lines)

    translator = Translator(path, options)
    before, rate = translator(sample, shows=False)
    settings = {} if options.float32 else {"quantize": "int8"}
    report = transformer_fast.accelerate(translator.model, **settings)
    print(*(each for each in report.entries if "generate" in each.reason), sep="\n")
    translator(sample[:1], shows=False)  # packs the weights
    after, faster = translator(sample, shows=False)
    same = sum(one == other for one, other in zip(before, after, strict=True))
    print(f"{rate:.0f} tokens a second before accelerate, {faster:.0f} after: {faster / rate:.2f}")
    print(f"{same} of {len(sample)} translations are the same")
    found, _ = translator(lines)
    options.out.write_text("\n".join(found) + "\n", "utf-8")
    print(f"written: {options.out}, {len(found)} lines")


if __name__ == "__main__":
    main()
