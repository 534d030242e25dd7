"""The built wheel, installed where nothing of the checkout can be seen, does the whole job."""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import attncc
from tests.house.tree import ROOT, files


def build(kind: str, source: Path, folder: Path) -> Path:
    """Build `kind` (wheel or sdist) of a source tree with hatchling alone: no isolation, nothing fetched."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


class Installed:
    """An environment that holds the wheel; its dependencies are the running environment's."""

    def __init__(self, wheel: Path, folder: Path) -> None:
        self.folder, self.elsewhere = folder / "env", folder / "elsewhere"
        self.elsewhere.mkdir()
        venv.create(self.folder, with_pip=False, symlinks=True)
        self.bin = self.folder / "bin"
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install", "--no-deps", "--no-index"]
        subprocess.run([*pip, str(wheel)], check=True, capture_output=True, text=True)
        (self.site,) = self.folder.glob("lib/python*/site-packages")
        parents = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
        (self.site / "dependencies.pth").write_text("".join(f"{p}\n" for p in parents))
        self.environment = {
            "PATH": f"{self.bin}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "HOME": str(folder),
            "ATTNCC_CACHE_DIR": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
        }

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        program = [str(self.bin / command[0]), *command[1:]]
        return subprocess.run(
            program, cwd=self.elsewhere, env=self.environment, capture_output=True, text=True, check=False, timeout=300
        )


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(wheel, tmp_path_factory.mktemp("installed"))


def expected() -> set[str]:
    """Each source, grammar, template and spec of the checkout, by its name inside the wheel."""
    inside = {p for p in files() if p.startswith("attncc/")}
    return inside | {f"attncc/{p}" for p in files() if p.startswith(("templates/", "specs/"))}


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {n for n in archive.namelist() if ".dist-info/" not in n}


def test_the_wheel_holds_the_sources_the_templates_and_the_specs_and_nothing_else(wheel):
    assert names(wheel) == expected()


def test_the_source_archive_builds_the_same_wheel(wheel, tmp_path):
    archive = build("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "unpacked", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (source,) = (tmp_path / "unpacked").iterdir()
    assert names(build("wheel", source, tmp_path / "wheel")) == names(wheel)
    for path in ("tests/packaging/test_wheel.py", "Makefile", "CHANGELOG.md", "CONTRIBUTING.md", "specs/README.md"):
        assert (source / path).is_file(), path


def test_the_metadata_tells_version_licence_and_command(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (info,) = {n.split("/")[0] for n in archive.namelist() if ".dist-info/" in n}
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
        licence = archive.read(f"{info}/licenses/LICENSE").decode()
    assert metadata["Version"] == attncc.__version__
    assert metadata["License-Expression"] == "Apache-2.0" and "Apache License" in licence
    assert "attncc = attncc.cli:main" in entry_points


def test_the_installed_package_is_the_wheels(installed):
    code = "import attncc, importlib.metadata as m; print(attncc.__file__); print(m.version('attncc'))"
    done = installed.run("python", "-c", code)
    assert done.returncode == 0, done.stderr
    where, version = done.stdout.split()
    assert Path(where).is_relative_to(installed.site) and version == attncc.__version__


def test_the_installed_command_runs_from_anywhere(installed):
    for command in (("attncc", "--help"), ("python", "-m", "attncc", "--help")):
        done = installed.run(*command)
        assert done.returncode == 0 and "Usage: attncc" in done.stdout, done.stderr
    assert installed.run("attncc", "--version").stdout.split() == ["attncc", attncc.__version__]
    packaged = sorted(str(p) for p in (installed.site / "attncc" / "specs").glob("*.attn"))
    done = installed.run("attncc", "fmt", "--check", *packaged)
    assert done.returncode == 0, done.stderr


def test_the_installed_package_explains_and_builds_a_packaged_spec(installed):
    spec = str(installed.site / "attncc" / "specs" / "padding.attn")
    sizes = ("--shape", "batch=2,heads=2,q_len=100,k_len=100,head_dim=32", "--dtype", "f32")
    done = installed.run("attncc", "explain", spec, "--target", "sm_90", *sizes, "--set", "length=60,100", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["name"] == "padding" and told["mask"]["pairs"] == 2 * 100 * (60 + 100)
    done = installed.run("attncc", "build", spec, "--target", "cpu", *sizes, "--out", "built", "--json")
    assert done.returncode == 0, done.stderr
    (kernel,) = json.loads(done.stdout)["kernels"]
    assert kernel["target"] == "cpu" and kernel["pass"] == "forward"
    done = installed.run("python", "-I", kernel["file"])  # the file checks itself, by torch alone
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_installed_package_compiles_and_calls_a_spec(installed):
    code = """
import attncc, torch
from pathlib import Path
spec = Path(attncc.__file__).parent / "specs" / "padding.attn"
q, k, v = torch.randn(3, 2, 4, 50, 16)
length = torch.tensor([50, 20], dtype=torch.int32)
out = attncc.load(spec)(q, k, v, length=length)
keep = (torch.arange(50) < length[:, None])[:, None, None]
want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
print((out - want).abs().max().item())
"""
    done = installed.run("python", "-c", code)
    assert done.returncode == 0 and float(done.stdout) < 1e-5, done.stderr
