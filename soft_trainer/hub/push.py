"""Pushes a folder to the Hub, during a run or later with `soft-trainer push DIR USER/NAME`."""

from __future__ import annotations

import logging
import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError
from huggingface_hub.utils import filter_repo_objects, validate_repo_id

from soft_trainer.errors import UserError
from soft_trainer.files import write_text

logger = logging.getLogger(__name__)

REPO_TYPES = ("model", "dataset", "space")
# Pickles run code when loaded, and Trainer's `training_args.bin` contains the token. The other files are temporary.
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.joblib", "*.dill")
NEVER_PUSHED = (*PICKLES, ".*", "*/.*", "*.tmp", "*__pycache__*")
# The weights of an encoder, as patterns: all of them, or an adapter. A repository has one of the two.
WHOLE_FILES = ("config.json", "model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
# The rows of a run, in its folder PUSHED_ROWS. A repository has the splits of one run.
ROW_FILES = ("train.jsonl.gz", "valid.jsonl.gz", "test.jsonl.gz", "codebase.jsonl.gz")
PUSHED_ROWS = "pushed_rows"
UNMERGED = "unmerged"  # the folder of the trained encoder, where the output folder has the merged one
# A run's output folder also holds ranks and rows, which show source code that may be private.
NOT_PUSHED_WITH = {"model": ("checkpoint-*", "ranks-*", "data/*", f"{PUSHED_ROWS}/*", f"{UNMERGED}/*")}
WAITS = (1, 2, 4, 8, 16)  # seconds before each further try
_TOKENS_PAGE = "https://huggingface.co/settings/tokens"


def check_push(
    hub_model_id: str, token: str | None = None, private: bool | None = None, repo_type: str = "model"
) -> None:
    """Makes sure, before a long run, that its result can be pushed; creates the repository if it is missing.

    Args:
        hub_model_id: `USER/NAME`.
        token: the token to push with; None uses the one from `HF_TOKEN` or `hf auth login`.
        private: the visibility of a new repository.

    Raises:
        UserError: the name is invalid, there is no token, the token is invalid or may not write there, or the Hub
            cannot be reached.
    """
    api = _client(hub_model_id, token, repo_type)
    user = None
    try:
        user = api.whoami()
        _create(api, hub_model_id, private, repo_type)
        api.auth_check(hub_model_id, repo_type=repo_type, write=True)
    except (HTTPError, OSError) as error:
        message = f"cannot push to {hub_model_id}: {reason(error)}"
        if user:
            spaces = ", ".join([user["name"], *(group["name"] for group in user.get("orgs", []))])
            role = user.get("auth", {}).get("accessToken", {}).get("role", "unknown")
            message += f". This token (role {role!r}) belongs to {user['name']}: use one with the right to write from "
            message += f"{_TOKENS_PAGE}, or one of these as USER: {spaces}"
        raise UserError(message) from error


def push_folder(
    folder: str | Path,
    hub_model_id: str,
    token: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload",
    repo_type: str = "model",
    path_in_repo: str | None = None,
) -> str:
    """Pushes the files of `folder` in one commit, and returns its address.

    Creates the repository and the branch if they are missing. If an earlier push left weights of the other form (an
    adapter, or a whole encoder), or splits that the rows of this run lack, they are deleted. A transient failure is
    retried after `WAITS`. Unchanged files are not uploaded again.

    Args:
        token, private: as in `check_push`.
        revision: the branch to push to; None is `main`.
        repo_type: one of `REPO_TYPES`.
        path_in_repo: the folder of the repository to push to.

    Raises:
        UserError: there is nothing to push, a file contains the token, or the push failed for good. In the last case
            the message has the command that pushes later.
    """
    api = _client(hub_model_id, token, repo_type)
    folder = Path(folder)
    ignored = [*NEVER_PUSHED, *NOT_PUSHED_WITH.get(repo_type, ())]
    _check_files(folder, api.token, ignored)
    places = {"revision": revision, "path_in_repo": path_in_repo}
    replaced = [*WHOLE_FILES, *ADAPTER_FILES] if repo_type == "model" else []
    if repo_type == "dataset" and folder.name == PUSHED_ROWS:  # other data sets may be pushed file by file
        replaced = ROW_FILES
    # The client repeats single requests of an upload, but not the commit: a 500 there, or a commit by someone else in
    # between, ends `upload_folder`.
    for wait in (*WAITS, None):
        try:
            _create(api, hub_model_id, private, repo_type)
            if revision:
                api.create_branch(hub_model_id, branch=revision, repo_type=repo_type, exist_ok=True)
            return api.upload_folder(
                repo_id=hub_model_id,
                folder_path=folder,
                commit_message=commit_message,
                repo_type=repo_type,
                ignore_patterns=ignored,
                delete_patterns=replaced if any(next(folder.glob(name), None) for name in replaced) else None,
                **places,
            ).commit_url
        except (HTTPError, OSError, ValueError, RuntimeError) as error:
            # The client wraps a failed upload in a RuntimeError.
            cause = error.__cause__ or error if isinstance(error, RuntimeError) else error
            if wait is None or not _is_retryable(cause):
                later = later_command(folder, hub_model_id, private, repo_type=repo_type, **places)
                what = f"pushing {folder} to {hub_model_id} failed: {reason(cause)}"
                raise UserError(f"{what}; nothing is lost, push later with: {later}") from cause
            logger.warning("Push to %s failed (%s); next try in %d s.", hub_model_id, reason(cause), wait)
            time.sleep(wait)


def _is_retryable(error: BaseException) -> bool:
    """Returns True if a retry may succeed: after no response, too many requests, a conflict or a server error."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500 or error.response.status_code in (408, 409, 412, 429)
    return isinstance(error, (HTTPError, ConnectionError, TimeoutError))


def later_command(folder: str | Path, hub_model_id: str, private: bool | None = None, **options: str | None) -> str:
    """Returns the command line that pushes `folder` later, quoted for a shell; `options` are those of the command."""
    command = ["soft-trainer", "push", str(folder), hub_model_id, *(["--private"] if private else [])]
    for name, value in options.items():
        command += [f"--{name}", value] if value and (name, value) != ("repo_type", "model") else []
    return shlex.join(command)


def load_arguments(repo_id: str, revision: str | None = None) -> str:
    """Returns, as Python code, the arguments that load a repository or one of its branches."""
    return f'"{repo_id}"' + (f', revision="{revision}"' if revision else "")


def _create(api: HfApi, repo_id: str, private: bool | None, repo_type: str) -> None:
    """Creates the repository if it is missing."""
    sdk = "gradio" if repo_type == "space" else None
    api.create_repo(repo_id, private=private, repo_type=repo_type, exist_ok=True, space_sdk=sdk)


def _client(repo_id: str, token: str | None, repo_type: str) -> HfApi:
    """Returns a client with the given or the stored token; refuses anything but a valid `USER/NAME`."""
    option = "push_data_to_hub" if repo_type == "dataset" else "hub_model_id"
    token = token or get_token()
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"{option}={repo_id!r}: {str(error).splitlines()[0]}") from error
    complaint = f"{option}={repo_id!r}: write USER/NAME, with your user name or one of your organisations"
    if repo_id.count("/") != 1:
        raise UserError(complaint)
    if not token:
        raise UserError(f"no token for the Hub: run `hf auth login` or set HF_TOKEN to one from {_TOKENS_PAGE}")
    return HfApi(token=token)


def _check_files(folder: Path, token: str, ignored: Sequence[str]) -> None:
    """Refuses a folder with nothing to push, or with the token in one of its files."""
    paths = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    paths = list(filter_repo_objects(paths, ignore_patterns=ignored))
    if not paths:
        raise UserError(f"{folder}: no files to push")
    for path in paths:
        if not path.endswith(".safetensors") and token.encode() in (folder / path).read_bytes():
            raise UserError(f"{folder / path} contains the Hub token: remove it (and revoke it), then push again")


def reason(error: Exception) -> str:
    """Explains in one line what went wrong."""
    if not isinstance(error, HfHubHTTPError):
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    status = error.response.status_code
    message = error.server_message or error.response.reason_phrase
    known = {
        401: f"the token is not valid, take one from {_TOKENS_PAGE}",
        403: "the token may not write there",
        404: "there is no such repository",
    }
    return f"{known[status]} ({status}: {message})" if status in known else f"the Hub answered {status}: {message}"


def name_in_card(folder: str | Path, repo_id: str, revision: str | None) -> None:
    """Rewrites the snippets of a card so that they load the encoder from this repository."""
    path = Path(folder) / "README.md"
    card = path.read_text(encoding="utf-8") if path.is_file() else ""
    if match := re.search(r'load_encoder\(("[^"]+"(?:, revision="[^"]+")?)[,)]', card):
        write_text(path, card.replace(f"({match[1]}", f"({load_arguments(repo_id, revision)}"))
