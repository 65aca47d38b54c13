"""The Triton kernels without a GPU, in Triton's interpreter: how it runs is fixed when Triton is first imported."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SOME = [  # of each of the target's kernels a simple case, and of exact ones those that compare bits
    "test_narrow.py::test_parts_make_up_the_product[64-5-True-33]",
    "test_narrow.py::test_a_product_is_split_in_the_same_way_for_every_number_of_rows[2]",
    "test_narrow.py::test_a_row_has_the_same_bits_beside_others[16]",
    "test_gated.py::test_the_kernel_computes_gates_and_products[64-128-17]",
    "test_gated.py::test_a_row_has_the_same_bits_beside_a_few_others",
    "test_best.py::test_it_finds_what_torch_finds[9-4097]",
    "test_best.py::test_it_takes_the_first_of_equals_and_knows_odd_numbers",
    "test_attention.py::test_lists_see_what_the_mask_shows[6-2-24-200]",
    "test_attention.py::test_exact_rows_have_the_same_bits_wherever_the_text_ends[127-3-0]",
    "test_attention.py::test_exact_rows_have_the_same_bits_beside_other_texts[True]",
    "test_attention.py::test_exact_branches_have_the_bits_of_their_paths",
]
ALL = ["test_narrow.py", "test_gated.py", "test_best.py", "test_attention.py", "test_fused.py"]


@pytest.mark.skipif(find_spec("triton") is None, reason="there is no Triton for this system")
@pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the GPU")
@pytest.mark.parametrize("tests", [SOME, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
def test_kernels(tests: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *(f"tests/{test}" for test in tests)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    if tests is SOME:
        assert f"{len(SOME)} passed" in done.stdout, done.stdout  # none was skipped
