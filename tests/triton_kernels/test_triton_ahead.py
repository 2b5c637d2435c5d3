"""Machine code of the Triton kernels for five architectures: registers, memory, instructions."""

from __future__ import annotations

import json

import pytest
from harness import python

from transformer_fast.backends.triton import config
from transformer_fast.ops.layer_norm import NORMS

pytestmark = pytest.mark.thorough

CALLS = (
    r"attention bfloat16 head (HEADS)( groups, causal| packed|)$"
    r"|layer_norm bfloat16 columns 512 dropout"
    r"|feed_forward bfloat16 (relu|few)|cross_entropy bfloat16 classes 1000$"
)
#: 86 and 120 have the same tile table, since their instructions and shared memory are the same.
HEADS = {86: "64", 120: "128"}
#: Maximum stack bytes per thread; the kernel for dK and dV keeps two accumulators in registers.
SPILLED = {
    "attention_backward_key_kernel": 256, "attention_backward_query_kernel": 32,
    "matmul_kernel": 64, "matmul_descriptor_kernel": 64,
}  # fmt: skip
#: On sm_100 the limit is higher, for grouped heads.
SPILLED_100 = {"attention_backward_key_kernel": 512}
#: An instruction that shows that the matrix unit is used: of Hopper, of Blackwell, and before.
UNIT = {90: "HGMMA", 80: "HMMA", 86: "HMMA", 100: "UTCHMMA", 120: "HMMA"}


#: Prints a line of JSON per kernel. ``columns``: N of Hopper's matrix instructions.
COMPILE = r"""
import json, re, sys, triton
from transformer_fast.backends.triton import compile_ahead

architecture, (match, unit) = int(sys.argv[1]), sys.argv[2:]
for case in compile_ahead.cases():
    for launch in compile_ahead.launches(case, architecture) if re.search(match, case.name) else ():
        found = compile_ahead.compile_launch(launch, architecture)
        code = compile_ahead.output_of(triton.knobs.nvidia.nvdisasm, "-c", found.cubin)
        about = {**vars(found), "cubin": None, "call": case.name, "fits": found.fits}
        about["unit"] = bool(re.search(rf"\b{unit}", code))
        about["columns"] = sorted({int(n) for n in re.findall(r"\bHGMMA\.\d+x(\d+)x", code)})
        print(json.dumps(about), flush=True)
"""


def compiled(architecture: int) -> list[dict]:
    match = CALLS.replace("HEADS", HEADS.get(architecture, "64|128"))
    done = python("-c", COMPILE, str(architecture), match, UNIT[architecture], status=None)
    if "nvdisasm" in done.stderr or "cuobjdump" in done.stderr:
        pytest.skip(f"NVIDIA's disassembler is not here: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.sampled(100, 20)  # half a minute of compilation each
@pytest.mark.parametrize("architecture", UNIT)
def test_registers_spills_and_instructions(architecture):
    ours, theirs = (config.attention("attention_forward", a, 64, True, False) for a in (86, 120))
    assert ours is theirs
    kernels = compiled(architecture)
    assert len(kernels) == (19 if architecture in HEADS else 28), [k["kernel"] for k in kernels]
    for one in kernels:
        about = f"{one['kernel']} of {one['call']}: {one}"
        assert one["fits"], about
        assert one["registers"] <= 255, about
        limits = {**SPILLED, **(SPILLED_100 if architecture == 100 else {})}
        assert one["spilled"] <= limits.get(one["kernel"], 0), about
        if "matmul" in one["kernel"] or "attention" in one["kernel"]:
            assert one["unit"], about
        if architecture == 90 and "attention" in one["kernel"]:
            # The rarely used loop for values that are not finite works on chunks of 16 and 32
            # columns.
            rare = {16, 32} if "causal" in one["call"] else set()
            assert one["columns"], about
            assert min(set(one["columns"]) - rare) >= 64, about
    if architecture == 90:
        products = [one for one in kernels if one["kernel"] == "matmul_descriptor_kernel"]
        assert {max(one["columns"]) for one in products} == {128, 256}


WARM = """
import triton
from triton.backends.compiler import GPUTarget

class Driver:
    def get_current_device(self):
        return 0
    def get_current_stream(self, device):
        return 0
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

triton.runtime.driver.set_active(Driver())
import torch, transformer_fast
from transformer_fast.backends.triton import compile_ahead, config
cases = compile_ahead.cases
compile_ahead.cases = lambda *sizes: [one for one in cases(*sizes) if "_norm" in one.name]
try:
    transformer_fast.warm(device=torch.device("cpu"))
except RuntimeError as error:
    assert "is none" in str(error)
with config.use_architecture(90):
    print(transformer_fast.warm(columns=[512, 768]))
"""


def test_warming_fills_tritons_cache(tmp_path):
    done = python("-c", WARM, TRITON_CACHE_DIR=str(tmp_path))
    # All norms, one of them with dropout, forward and backward; the column sums are shared.
    count = 2 * (len(NORMS) + 1)
    made = [path.stem for path in tmp_path.rglob("*.cubin")]
    assert {name: made.count(name) for name in made} == {
        "layer_norm_forward_kernel": count, "layer_norm_backward_kernel": count, "column_sum_kernel": 1,
    }  # fmt: skip
    assert int(done.stdout) == 3 * count
