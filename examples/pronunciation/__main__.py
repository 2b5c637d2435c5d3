"""Trains a small Transformer to pronounce English words.

    make example                                    takes about 15 minutes on two idle cores
    python -m examples.pronunciation --quick        trains a smaller model
    python -m examples.pronunciation --resume       continues an interrupted run
    python -m examples.pronunciation --resume --say transformer attention
    torchrun --nproc-per-node 2 -m examples.pronunciation

The data is the CMU Pronouncing Dictionary (``pip install 'transformer_fast[example]'``): words are
sequences of letters, pronunciations sequences of phonemes. A tenth of the words, chosen by their
hash, is the test set.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import transformer_fast
from transformer_fast import models, training

from . import dictionary as data
from .model import (
    Setting,
    evaluate,
    make_loader,
    make_model,
    make_trainer,
    picture,
    pronounce,
    race,
)

_SHOWN = 12


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.pronunciation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help=f"training steps ({Setting.steps})")
    length.add_argument("--minutes", type=float, help="training time, instead of --steps")
    parser.add_argument("--quick", action="store_true", help="train a small model (half a minute)")
    parser.add_argument("--resume", action="store_true", help="continue the run in --output")
    parser.add_argument("--seed", type=int, help="seed of weights, order and dropout (0)")
    parser.add_argument("--beams", type=int, default=4, help="beams in the final test (4)")
    parser.add_argument(
        "--race-steps", type=int, help="steps of the comparison of backends (60); 0: none"
    )
    parser.add_argument("--say", nargs="+", metavar="WORD", default=[], help="words to pronounce")
    parser.add_argument("--dictionary", type=Path, help="another file in the dictionary's format")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/pronunciation"), help="folder of the results"
    )
    options = parser.parse_args(arguments)
    for name in ("steps", "minutes", "beams"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            parser.error(f"--{name} must be above 0, not {value}")
    if options.resume and any(v is not None for v in (options.steps, options.seed)):
        parser.error("--resume uses the --steps and --seed of the interrupted run")
    return options


def choose_setting(options: argparse.Namespace, dictionary: data.Dictionary) -> Setting:
    """Returns the setting given by the options, or that of the run to resume."""
    file = options.output / "setting.json"
    if options.resume:
        if not file.exists():
            raise SystemExit(f"There is nothing to resume in {options.output}.")
        return Setting(**json.loads(file.read_text(encoding="utf-8")))
    seed = options.seed or 0
    setting = Setting.quick(seed) if options.quick else Setting(seed=seed)
    if options.minutes is not None:
        setting = dataclasses.replace(setting, steps=steps_in(options.minutes, setting, dictionary))
    elif options.steps is not None:
        setting = dataclasses.replace(setting, steps=options.steps)
    return setting


def steps_in(minutes: float, setting: Setting, dictionary: data.Dictionary) -> int:
    """Estimates the number of steps that take this long, from 15 steps."""
    trainer = make_trainer(make_model(setting, dictionary), setting)
    history = trainer.fit(make_loader(dictionary.train, dictionary, setting), steps=15)
    seconds = sorted(history.seconds[5:])
    return max(1, int(60.0 * minutes / seconds[len(seconds) // 2]))


def backend_of_training(model: models.Transformer) -> str | None:
    """Returns the backend that runs attention in a training step."""
    layer = model.encoder.stack.layers[0].self_attn
    width = layer.embed_dim // layer.num_heads
    heads = next(model.parameters()).new_zeros((2, layer.num_heads, 8, width)).requires_grad_()
    return transformer_fast.explain(
        "attention", heads, heads, heads, dropout_p=layer.dropout
    ).backend


def show(model: models.Transformer, dictionary: data.Dictionary, beams: int) -> None:
    """Prints pronunciations of some test words, and the dictionary's where they differ."""
    step = max(1, len(dictionary.test) // _SHOWN)
    entries = dictionary.test[step // 2 :: step][:_SHOWN]
    found = pronounce(model, [entry.word for entry in entries], dictionary, beams)
    for entry, ours in zip(entries, found, strict=True):
        mark = " " if ours in entry.pronunciations else "x"
        print(f"  {mark} {entry.word:16} {' '.join(ours)}")
        if mark == "x":
            print(f"    {'dictionary:':16} {' | '.join(map(' '.join, entry.pronunciations))}")


def say(
    model: models.Transformer, dictionary: data.Dictionary, options: argparse.Namespace
) -> None:
    words = [word.lower() for word in options.say]
    for word, ours in zip(words, pronounce(model, words, dictionary, options.beams), strict=True):
        print(f"  {word:18} {' '.join(ours)}")


def run(options: argparse.Namespace, device: torch.device) -> None:
    dictionary = data.load(options.dictionary)
    first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    report_line = print if first else lambda *_: None
    setting = choose_setting(options, dictionary)
    options.output.mkdir(parents=True, exist_ok=True)
    model = make_model(setting, dictionary).to(device)
    if not first:  # the same weights, but another dropout pattern
        torch.manual_seed(setting.seed + 1_000_003 * torch.distributed.get_rank())
    trainer = make_trainer(
        training.parallelise(model), setting, checkpoint=options.output / "checkpoint.pt"
    )
    if options.resume and not trainer.resume():
        raise SystemExit(f"There is no checkpoint in {options.output} yet.")
    if first:
        text = json.dumps(dataclasses.asdict(setting), indent=1)
        (options.output / "setting.json").write_text(text + "\n", encoding="utf-8")

    train = make_loader(dictionary.train, dictionary, setting)
    valid = make_loader(dictionary.validation, dictionary, setting, shuffle=False)
    some = dictionary.validation[:: max(1, len(dictionary.validation) // 500)]
    backend = backend_of_training(model)
    report_line(
        f"{len(dictionary.train):,} words to train on, {len(dictionary.test):,} to test on; "
        f"{sum(p.numel() for p in model.parameters()):,} parameters; {setting.steps:,} steps "
        f"({setting.steps / len(train):.1f} epochs) on '{backend}', "
        f"{torch.get_num_threads()} thread(s)"
    )

    def validate(wrapped: torch.nn.Module) -> dict[str, float]:
        loss = training.evaluate(wrapped, trainer.objective, valid)
        found = evaluate(model, some, dictionary)
        taken = sum(trainer.history.seconds)
        report_line(
            f"step {trainer.step:6,}  {taken / 60:5.1f} min  validation loss {loss:.4f}, {found}"
        )
        return {"loss": loss, "per": found.phoneme_error_rate, "wer": found.word_error_rate}

    if trainer.step < setting.steps:
        # Raises an error if a step runs on the reference although there are kernels.
        with transformer_fast.strict(backend != "reference"):
            trainer.fit(
                train,
                steps=setting.steps,
                validation=validate,
                validate_every=max(1, min(len(train), setting.steps // 3)),
            )
    seconds = trainer.history.seconds
    report_line(
        f"{trainer.step:,} steps took {sum(seconds) / 60:.1f} minutes, the median one "
        f"{statistics.median(seconds) * 1e3:.0f} ms"
    )
    if first:
        report(options, setting, dictionary, model, trainer)


def report(
    options: argparse.Namespace,
    setting: Setting,
    dictionary: data.Dictionary,
    model: models.Transformer,
    trainer: training.Trainer,
) -> None:
    print(f"test, greedy:   {evaluate(model, dictionary.test, dictionary)}")
    if options.beams > 1:
        began = time.perf_counter()
        found = evaluate(model, dictionary.test, dictionary, options.beams)
        took = time.perf_counter() - began
        print(f"test, {options.beams} beams:  {found} ({found.words / took:,.0f} words per second)")
    show(model, dictionary, options.beams)
    say(model, dictionary, options)
    picture({"training": trainer.history}, options.output / "loss.png")
    steps = (20 if options.quick else 60) if options.race_steps is None else options.race_steps
    alone = not torch.distributed.is_initialized()
    if steps and alone:
        loader = make_loader(dictionary.train, dictionary, setting)
        print(race(loader, setting, dictionary, steps, options.output / "race.png"))
    print(f"pictures and checkpoint: {options.output}")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    try:
        with training.process_group() as device:
            run(options, device)
    except KeyboardInterrupt:
        raise SystemExit(f"interrupted; use --resume to continue from {options.output}") from None


if __name__ == "__main__":
    main()
