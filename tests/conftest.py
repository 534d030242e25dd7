"""What all tests share: a cache of their own, and the flag that renews committed renders."""

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--renew", action="store_true", help="write the committed renders anew instead of comparing them")


@pytest.fixture(autouse=True, scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory):
    """One cache for the run, shared by its workers (it is made for that), and never the user's."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNCC_CACHE_DIR", str(folder / "attncc-cache"))
        patch.setenv("TRITON_CACHE_DIR", str(folder / "triton-cache"))
        yield
