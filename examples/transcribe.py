"""Transcribes recordings with Whisper on the CPU, with timestamps, by the `generate` of transformers.

Recordings may be longer than Whisper's window of 30 seconds. The first window is transcribed before and
after `transformer_fast.accelerate`, to show what it gains.

    python examples/transcribe.py --model openai/whisper-tiny --out out.txt talk.wav
    python examples/transcribe.py --make --out out.txt talk.wav

`--model` is a folder or a name of the Hugging Face hub. `--make` makes a small model with random weights
instead, whose transcripts are meaningless: it shows that the example runs. Recordings are WAV files
of 16 bits at 16 kHz. ffmpeg converts others: ffmpeg -i talk.mp3 -ar 16000 -ac 1 -sample_fmt s16 talk.wav

Needs transformers: pip install transformers
"""

from __future__ import annotations

import argparse
import sys
import time
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel

import transformer_fast

RATE, WINDOW = 16000, 30


def read(path: Path) -> np.ndarray:
    """Returns the samples (n,) of a recording, between -1 and 1; channels are averaged."""
    with wave.open(str(path), "rb") as file:
        if (file.getframerate(), file.getsampwidth()) != (RATE, 2):
            raise SystemExit(
                f"{path} has {8 * file.getsampwidth()} bits at {file.getframerate()} Hz, not 16 bits at "
                f"{RATE} Hz: ffmpeg -i {path} -ar {RATE} -ac 1 -sample_fmt s16 other.wav"
            )
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        return samples.reshape(-1, file.getnchannels()).mean(1, dtype=np.float32) / 32768


def make_model(path: Path) -> None:
    """Saves a small Whisper with random weights, and a tokenizer of single bytes."""
    names = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>"]
    names += ["<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    times = [f"<|{i * 0.02:.2f}|>" for i in range(1501)]
    vocabulary = {byte: i for i, byte in enumerate(sorted(ByteLevel.alphabet()))}
    vocabulary["<|endoftext|>"] = len(vocabulary)
    tokenizer = transformers.WhisperTokenizer(vocabulary, [])
    tokenizer.add_tokens(names, special_tokens=True)
    tokenizer.add_tokens(times)
    numbers = dict(zip(names, tokenizer.convert_tokens_to_ids(names), strict=True))
    end, start = numbers["<|endoftext|>"], numbers["<|startoftranscript|>"]
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer), d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=128,
        decoder_ffn_dim=128, decoder_start_token_id=start, pad_token_id=end, bos_token_id=end,
        eos_token_id=end, suppress_tokens=[1, 2], begin_suppress_tokens=[end],
    )  # fmt: skip
    model: Any = transformers.WhisperForConditionalGeneration(config)
    model.generation_config = transformers.GenerationConfig(
        no_timestamps_token_id=numbers["<|notimestamps|>"], is_multilingual=True,
        lang_to_id={"<|en|>": numbers["<|en|>"]}, prev_sot_token_id=numbers["<|startofprev|>"],
        task_to_id={name: numbers[f"<|{name}|>"] for name in ("transcribe", "translate")},
        suppress_tokens=[1, 2], begin_suppress_tokens=[end], max_length=64, pad_token_id=end,
        eos_token_id=end, bos_token_id=end, decoder_start_token_id=start,
    )  # fmt: skip
    features = transformers.WhisperFeatureExtractor()
    for part in (model, transformers.WhisperProcessor(features, tokenizer)):
        part.save_pretrained(path)


def transcribe(
    model: Any, processor: Any, samples: np.ndarray, shows: bool = False, **settings: Any
) -> tuple[list[str], int]:
    """Returns a line for each segment, with its times in seconds, and the number of tokens."""
    is_long = len(samples) > WINDOW * RATE
    way = {"truncation": False, "padding": "longest"} if is_long else {}
    given = processor(
        samples, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True, **way
    )
    if shows:

        def progress(frames: torch.Tensor) -> None:
            done, of = frames[0].tolist()  # of 10 ms
            print(f"\r{min(done, of) / 100:.0f} of {of / 100:.0f} s", end="", file=sys.stderr)

        settings["monitor_progress"] = progress
    found = model.generate(**given, return_timestamps=True, return_segments=True, **settings)
    if shows:
        print(f"\r{len(samples) / RATE:.0f} of {len(samples) / RATE:.0f} s", file=sys.stderr)
    lines, tokens = [], 0
    for one in found["segments"][0]:
        tokens += len(one["tokens"])
        text = processor.decode(one["tokens"], skip_special_tokens=True)
        lines.append(f"[{float(one['start']):.2f} - {float(one['end']):.2f}] {text.strip()}")
    return lines, tokens


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("audio", type=Path, nargs="+", help="WAV files")
    parser.add_argument("--out", type=Path, required=True, help="file of the transcripts")
    models = parser.add_mutually_exclusive_group(required=True)
    models.add_argument("--model", help="folder, or name on the hub")
    models.add_argument("--make", action="store_true", help="make a model with random weights")
    parser.add_argument("--language", help="(default: Whisper finds it)")
    parser.add_argument("--task", choices=("transcribe", "translate"), default="transcribe")
    parser.add_argument("--beams", type=int, default=1)
    parser.add_argument("--float32", action="store_true", help="instead of int8")
    options = parser.parse_args(arguments)
    path = options.model
    if options.make:
        path = str(options.out.parent / "made_whisper")
        make_model(Path(path))
    processor = transformers.AutoProcessor.from_pretrained(path)
    model: Any = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(path).eval()
    settings: dict[str, Any] = {"num_beams": options.beams}
    if getattr(model.generation_config, "is_multilingual", False):
        settings |= {"task": options.task, "language": options.language}

    def timed(samples: np.ndarray, shows: bool = False) -> tuple[list[str], str]:
        start = time.perf_counter()
        lines, tokens = transcribe(model, processor, samples, shows, **settings)
        took = time.perf_counter() - start
        factor = took * RATE / max(len(samples), 1)
        return lines, f"{tokens / took:.0f} tokens a second, real-time factor {factor:.3f}"

    first = read(options.audio[0])[: WINDOW * RATE]
    print(f"first window, before accelerate: {timed(first)[1]}")
    transformer_fast.accelerate(model, **({} if options.float32 else {"quantize": "int8"}))
    timed(first)  # packs the weights
    print(f"first window, after accelerate:  {timed(first)[1]}")
    with options.out.open("w", encoding="utf-8") as out:
        for each in options.audio:
            lines, speed = timed(read(each), shows=True)
            print(f"{each}: {len(lines)} segments, {speed}")
            out.writelines(f"{line}\n" for line in (str(each), *lines))


if __name__ == "__main__":
    main()
