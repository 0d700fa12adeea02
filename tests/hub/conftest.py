"""Fixtures for a Hub on the loopback address, and tiny encoders to push to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from server import WRITE_TOKEN

from soft_trainer.options.parse import as_argv
from soft_trainer.system.terminal import exit_on_user_error

SERVER = Path(__file__).with_name("server.py")
ROOT = SERVER.parents[2]
SCRIPT = ROOT / "run_codesearch.py"
TINY = {
    "language": "python", "from_scratch": "32x1", "vocabulary_size": 400, "query_length": 16, "code_length": 32,
    "per_device_train_batch_size": 8, "num_train_epochs": 3, "use_cpu": True, "disable_tqdm": True, "lexical": False,
    "examples": 0,
}  # fmt: skip


class LoopbackHub:
    """A Hub server in another process, with methods to inject faults and to run clients that know only this Hub."""

    def __init__(self):
        self.process = subprocess.Popen([sys.executable, SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"

    def reset(self, home: Path) -> None:
        """Deletes everything on the Hub and gives clients the empty home `home`."""
        self.home = home
        self.request("POST", "/-/reset")

    def request(self, method: str, path: str, content=None):
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self.url + path, body, method=method)
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.load(response)

    def fault(self, **times: int) -> dict[str, int]:
        """Makes the next requests fail, for example `cut_upload=2` (-1 for all). Returns the faults that are left."""
        return self.request("POST", "/-/faults", times)

    def requests(self, containing: str) -> list[str]:
        """Returns the requests so far whose method and path contain a text, such as "POST /api/repos"."""
        return [line for line in self.request("GET", "/-/log") if containing in line]

    def remove(self, repo: str) -> None:
        """Deletes a model repository from the Hub."""
        self.request("DELETE", f"/-/repos/models/{repo}")

    def holding(self, text: str) -> list[str]:
        """Returns the files in all commits, the stored objects and the requests that contain a text."""
        return self.request("GET", f"/-/holding/{text}")

    def run(self, *arguments: str | Path, token: str | None = None) -> subprocess.CompletedProcess:
        """Runs Python with these arguments in a process that knows only this Hub."""
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, env=self.environment(token), capture_output=True, text=True, timeout=300)

    def environment(self, token: str | None = None) -> dict[str, str]:
        """Returns the environment variables for a client of this Hub, with an empty home and only this token."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        hub = {"HF_ENDPOINT": self.url, "HF_HOME": str(self.home), "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT)}
        return kept | hub | {"OMP_NUM_THREADS": "1"} | ({"HF_TOKEN": token} if token else {})

    def train(self, token: str, **options) -> subprocess.CompletedProcess:
        """Runs the training script in a process that knows only this Hub, with tiny settings and these options."""
        return self.run(SCRIPT, *as_argv(TINY | options), token=token)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        """Stops the server, so that clients get no answer."""
        self.process.stdin.close()
        self.process.wait(10)
        self.process.stdout.close()


@pytest.fixture(scope="session")
def servers():
    """Keeps the started servers for all tests. If a test stops its server, the next test starts another."""
    started: list[LoopbackHub] = []
    yield started
    for server in started:
        if server.running:
            server.stop()


@pytest.fixture
def hub(servers, tmp_path):
    """Provides an empty Hub in a separate process, with an empty `HF_HOME` for its clients."""
    if not servers or not servers[-1].running:
        servers.append(LoopbackHub())
    servers[-1].reset(tmp_path / "hf_home")
    return servers[-1]


@pytest.fixture
def here(hub, monkeypatch):
    """Makes clients in this process use the loopback Hub. `push` does not wait between attempts."""
    import datasets
    from huggingface_hub import constants

    replaced = {
        (constants, "ENDPOINT"): hub.url,
        (constants, "HUGGINGFACE_CO_URL_TEMPLATE"): hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        (constants, "HF_HUB_OFFLINE"): False,
        (constants, "HF_HUB_DISABLE_XET"): True,
        (constants, "HF_TOKEN_PATH"): str(hub.home / "token"),
        (constants, "HF_HUB_CACHE"): str(hub.home / "hub"),
        (constants, "HF_XET_CACHE"): str(hub.home / "xet"),
        (datasets.config, "HF_ENDPOINT"): hub.url,
        (datasets.config, "HF_HUB_OFFLINE"): False,
        (datasets.config, "HF_DATASETS_CACHE"): hub.home / "datasets",
        (time, "sleep"): lambda seconds: None,
    }
    for (module, name), value in replaced.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return hub


class Train:
    """Runs the training script in this process and keeps its output, so that tests can search it for tokens."""

    def __init__(self, script, hub: LoopbackHub, folder: Path, data_dir: Path, capfd, caplog):
        self.script, self.hub, self.folder, self.data_dir = script, hub, folder, data_dir
        self._capfd, self._caplog, self.said = capfd, caplog, ""

    def __call__(self, **options) -> tuple[int, str]:
        """Runs a tiny training with these options. Returns its exit code and its error line, or ""."""
        own, code = {"data_dir": self.data_dir, "output_dir": self.folder}, 0
        try:
            with exit_on_user_error():
                self.script.main(as_argv(TINY | own | options))
        except SystemExit as exit:
            code = exit.code
        printed = self._capfd.readouterr()
        self.said += printed.out + printed.err + self._caplog.text
        errors = [line for line in printed.err.splitlines() if line.startswith("error: ")]
        assert len(errors) == bool(code)
        return code, "".join(errors)

    def sources_of(self, text: str) -> list[str]:
        """Returns where a text occurs: in files here, in files on the Hub, or in the output ("said")."""
        files = [path for folder in (self.folder, self.hub.home) for path in folder.rglob("*") if path.is_file()]
        here = [str(path) for path in files if text.encode() in path.read_bytes()]
        there = self.hub.holding(text) if self.hub.running else []
        return here + there + (["said"] if text in self.said else [])


@pytest.fixture
def train(script_module, here, data_dir, tmp_path, monkeypatch, capfd, caplog):
    """Provides `Train` with the loopback Hub and a token that may write to it."""
    monkeypatch.setenv("HF_TOKEN", WRITE_TOKEN)
    return Train(script_module, here, tmp_path / "out", data_dir, capfd, caplog)
