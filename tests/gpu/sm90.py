"""Compile the kernels for sm_90 as they are launched, without a GPU, and print what the machine code does, as JSON.

Run as a program of its own: in the tests' process the kernels are made for Triton's interpreter.
"""

import collections
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gpu_validate.attention import paged
from gpu_validate.dtypes import get_dtype
from gpu_validate.kernels.copy import copy_rows
from gpu_validate.kernels.decode import combine_splits, decode_split
from gpu_validate.kernels.store import store_tokens
from gpu_validate.store import launch_constants as store_constants
from gpu_validate.triton_mover import launch_constants
from sim.serving.models import Model, get_model

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
STRIDES = ("k_stride", "v_stride")  # of a model's heads, multiples of 16 that Triton notices
ELEMENT = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "fp8": "fp8e4nv"}
OPERATION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")


def compile_kernel(kernel: Any, signature: dict[str, str], constants: dict[str, Any]) -> dict[str, Any]:
    """Compile for an H100 or H200; return its operations in order, registers, and bytes of local memory."""
    options = {key: constants.pop(key) for key in ("num_warps", "num_stages") if key in constants}
    types = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    # torch's allocations are aligned to 16 bytes and more; Triton looks at each pointer and says so to the compiler.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if (types[name].startswith("*") and not kernel.params[i].do_not_specialize_on_alignment) or name in STRIDES
    }
    where = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, types, constexprs=where, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        code = subprocess.run([TOOLS / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
        used = subprocess.run([TOOLS / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True)
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", used.stdout + used.stderr))
    order = OPERATION.findall(code)
    return {
        "operations": collections.Counter(order),
        "loads_before_the_first_store": sum(
            op == "LDG.E.128" for op in order[: next(i for i, op in enumerate(order) if op.startswith("STG"))]
        ),
        "registers": int(usage["REG"]),
        "stack": int(usage["STACK"]),
        "local": int(usage["LOCAL"]),
        "shared": compiled.metadata.shared,
        "architecture": re.search(r"\.target (\w+)", compiled.asm["ptx"]).group(1),  # type: ignore[union-attr]
    }


def mover(row_bytes: int, alignment: int) -> dict[str, Any]:
    words = {"from_planes": "*i64", "to_planes": "*i64", "src": "*i64", "dst": "*i64", "count": "i32"}
    return compile_kernel(copy_rows, words, launch_constants(row_bytes, alignment))


def attention(model: Model, block_size: int, dtype: str, masked: bool, splits: int) -> dict[str, Any]:
    kind = get_dtype(dtype)
    stored, compute = f"*{ELEMENT[dtype]}", f"*{ELEMENT[{'fp8': 'bf16'}.get(dtype, dtype)]}"
    signature = {
        "q": compute,
        "k_cache": stored,
        "v_cache": stored,
        "k_scale": "*fp32" if kind.scaled else stored,
        "v_scale": "*fp32" if kind.scaled else stored,
        "table": "*i32",
        "lengths": "*i32",
        "live": "*i32",
        "out": compute,
        "partial": "*fp32",
        "partial_lse": "*fp32",
        "scale": "fp32",
        "table_stride": "i32",
        "live_stride": "i32",
    }
    constants = paged.launch_constants(model, block_size, kind, masked=masked, upcast=False)
    return compile_kernel(decode_split, signature, constants | {"SPLITS": splits})


def store(model: Model, dtype: str) -> dict[str, Any]:
    kind = get_dtype(dtype)
    given, stored = f"*{ELEMENT[{'fp8': 'bf16'}.get(dtype, dtype)]}", f"*{ELEMENT[dtype]}"
    scale = "*fp32" if kind.scaled else stored
    signature = {"k": given, "v": given, "slots": "*i64", "k_cache": stored, "v_cache": stored}
    signature |= {"k_scale": scale, "v_scale": scale, "k_stride": "i32", "v_stride": "i32"}
    return compile_kernel(store_tokens, signature, store_constants(model, kind))


def main() -> None:
    llama, small = get_model("llama-3.1-8b"), get_model("llama-3.2-1b")
    kernels = {
        "copy 2048": mover(2048, 16),  # Llama-3.1-8B in bf16
        "copy 384": mover(384, 16),  # SmolLM2-135M: three heads
        "copy 32": mover(32, 16),  # the scales of eight heads
        "decode bf16 128": attention(llama, 16, "bf16", False, 8),
        "decode bf16 64 live": attention(small, 48, "bf16", True, 8),
        "decode fp16 128 unsplit": attention(llama, 16, "fp16", False, 1),
        "decode fp32 128": attention(llama, 16, "fp32", False, 8),
        "decode fp8 128": attention(llama, 16, "fp8", False, 8),
        "decode fp8 64 live": attention(small, 16, "fp8", True, 8),
        "store fp8": store(llama, "fp8"),
        "store bf16": store(llama, "bf16"),
        "combine 64": compile_kernel(
            combine_splits,
            {"partial": "*fp32", "partial_lse": "*fp32", "out": "*bf16"},
            {"HEAD_DIM": 128, "SPLITS": 64, "SPLITS_PAD": 64, "num_warps": 4},
        ),
    }
    json.dump(kernels, sys.stdout)


if __name__ == "__main__":
    main()
