"""Pushes a folder to the Hub."""

from __future__ import annotations

import logging
import re
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError
from huggingface_hub.utils import filter_repo_objects, validate_repo_id

from soft_trainer.errors import UserError

logger = logging.getLogger(__name__)

REPO_TYPES = ("model", "dataset", "space")
# Pickles run code when loaded, and Trainer's `training_args.bin` holds the token; the rest is of this machine only.
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.joblib", "*.dill")
NEVER_PUSHED = (*PICKLES, ".*", "*/.*", "*.tmp", "*__pycache__*")
# What a run's output folder holds beside the encoder; ranks and rows show source code that may not be for everybody.
PUSHED_ROWS = "pushed_rows"
NO_PART = {"model": ("checkpoint-*", "ranks-*", "data/*", f"{PUSHED_ROWS}/*")}
WAITS = (1, 2, 4, 8, 16)  # seconds before each further try
_TOKENS_PAGE = "https://huggingface.co/settings/tokens"


def check_push(
    hub_model_id: str, token: str | None = None, private: bool | None = None, repo_type: str = "model"
) -> None:
    """Make sure, before a long run, that its result can be pushed; creates the repository where it is missing.

    Args:
        hub_model_id: `USER/NAME`.
        token: the token to push with; the one of `HF_TOKEN` or `hf auth login` when None.
        private: visibility of a repository that is created.

    Raises:
        UserError: the name is not valid, there is no token, it is not valid or may not write there, or the Hub cannot
            be reached.
    """
    _check_name(hub_model_id, repo_type)
    api = HfApi(token=_token(token))
    try:
        user = api.whoami()
    except (HTTPError, OSError) as error:
        raise UserError(f"cannot push to {hub_model_id}: {reason(error)}") from error
    try:
        _create(api, hub_model_id, private, repo_type)
        api.auth_check(hub_model_id, repo_type=repo_type, write=True)
    except (HTTPError, OSError) as error:
        spaces = ", ".join([user["name"], *(group["name"] for group in user.get("orgs", []))])
        role = user.get("auth", {}).get("accessToken", {}).get("role", "unknown")
        raise UserError(
            f"cannot push to {hub_model_id}: {reason(error)}. This token (role {role!r}) belongs to {user['name']}: "
            f"use one with the right to write from {_TOKENS_PAGE}, or one of these as USER: {spaces}"
        ) from error


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
    """Push the files of `folder` in one commit, creating repository and branch where missing.

    What passes (no connection, 429, 5xx, also on the commit itself, a commit by someone else in between) is tried
    again after `WAITS`. Files that are already there unchanged are not sent again.

    Args:
        token, private, repo_type: as in `check_push`; repo_type one of `REPO_TYPES`.
        revision: the branch to push to, `main` when None.
        path_in_repo: folder of the repository to put the files into.

    Returns:
        The address of the commit.

    Raises:
        UserError: nothing to push, the token stands in one of the files, or the push failed for good; the message
            has the command that pushes later.
    """
    _check_name(hub_model_id, repo_type)
    folder, token = Path(folder), _token(token)
    ignored = [*NEVER_PUSHED, *NO_PART.get(repo_type, ())]
    _check_files(folder, token, ignored)
    api = HfApi(token=token)

    def push() -> str:
        _create(api, hub_model_id, private, repo_type)
        if revision:
            api.create_branch(hub_model_id, branch=revision, repo_type=repo_type, exist_ok=True)
        return api.upload_folder(
            repo_id=hub_model_id,
            folder_path=folder,
            path_in_repo=path_in_repo,
            commit_message=commit_message,
            repo_type=repo_type,
            revision=revision,
            ignore_patterns=ignored,
        ).commit_url

    try:
        return _persist(push, hub_model_id)
    except (HTTPError, OSError, ValueError) as error:
        command = later_command(folder, hub_model_id, private, revision, repo_type, path_in_repo)
        raise UserError(
            f"pushing {folder} to {hub_model_id} failed: {reason(error)}; nothing is lost, push later with: {command}"
        ) from error


def _persist(push: Callable[[], str], repo_id: str) -> str:
    """Call `push` until it returns, waiting `WAITS` in between; raise what does not pass or lasts too long."""
    for wait in (*WAITS, None):
        try:
            return push()
        except (HTTPError, OSError, RuntimeError) as error:
            # The client wraps a failed upload into a RuntimeError.
            cause = error.__cause__ or error if isinstance(error, RuntimeError) else error
            if wait is None or not _passes(cause):
                raise cause from None
            logger.warning("Push to %s failed (%s); next try in %d s.", repo_id, reason(cause), wait)
            time.sleep(wait)
    raise AssertionError("the last try returns or raises")


def later_command(
    folder: str | Path,
    hub_model_id: str,
    private: bool | None = None,
    revision: str | None = None,
    repo_type: str = "model",
    path_in_repo: str | None = None,
) -> str:
    """The command line that pushes `folder` later, quoted for a shell."""
    command = ["soft-trainer", "push", str(folder), hub_model_id]
    command += ["--private"] if private else []
    command += ["--revision", revision] if revision else []
    command += ["--repo_type", repo_type] if repo_type != "model" else []
    command += ["--path_in_repo", path_in_repo] if path_in_repo else []
    return shlex.join(command)


def named(repo_id: str, revision: str | None = None) -> str:
    """The arguments by which code loads a repository, or one of its branches."""
    return f'"{repo_id}"' + (f', revision="{revision}"' if revision else "")


def _create(api: HfApi, repo_id: str, private: bool | None, repo_type: str) -> None:
    """Create the repository where it is missing."""
    sdk = "gradio" if repo_type == "space" else None
    api.create_repo(repo_id, private=private, repo_type=repo_type, exist_ok=True, space_sdk=sdk)


def _check_name(repo_id: str, repo_type: str) -> None:
    """Raise for anything but a valid `USER/NAME`."""
    option = "push_data_to_hub" if repo_type == "dataset" else "hub_model_id"
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"{option}={repo_id!r}: {str(error).splitlines()[0]}") from error
    if repo_id.count("/") != 1:
        raise UserError(f"{option}={repo_id!r}: write USER/NAME, with your user name or an organisation of yours")


def _token(token: str | None) -> str:
    """The token given or stored."""
    token = token or get_token()
    if not token:
        raise UserError(f"no token for the Hub: run `hf auth login` or set HF_TOKEN to one from {_TOKENS_PAGE}")
    return token


def _check_files(folder: Path, token: str, ignored: Sequence[str]) -> None:
    """Raise where there is nothing to push, or where the token stands in a file that would be."""
    paths = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    paths = list(filter_repo_objects(paths, ignore_patterns=ignored))
    if not paths:
        raise UserError(f"{folder}: no files to push")
    for path in paths:
        if not path.endswith(".safetensors") and token.encode() in (folder / path).read_bytes():
            raise UserError(f"{folder / path} contains the Hub token: remove it (and revoke it), then push again")


def _passes(error: Exception) -> bool:
    """Whether another try may succeed: no answer at all, too many requests, a conflict, or a fault of the server."""
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return status >= 500 or status in (408, 409, 412, 429)
    return isinstance(error, (HTTPError, ConnectionError, TimeoutError))


def reason(error: Exception) -> str:
    """What went wrong, for a person, in one line."""
    if not isinstance(error, HfHubHTTPError):
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    status, message = error.response.status_code, error.server_message or error.response.reason_phrase
    known = {
        401: f"the token is not valid, take one from {_TOKENS_PAGE}",
        403: "the token may not write there",
        404: "there is no such repository",
    }
    return f"{known[status]} ({status}: {message})" if status in known else f"the Hub answered {status}: {message}"


def name_in_card(folder: str | Path, repo_id: str, revision: str | None) -> None:
    """Let the snippets of a card that was written for another place load the encoder from this one."""
    path = Path(folder) / "README.md"
    card = path.read_text(encoding="utf-8") if path.is_file() else ""
    if written := re.search(r'load_encoder\(("[^"]+"(?:, revision="[^"]+")?)\)', card):
        path.write_text(card.replace(f"({written[1]}", f"({named(repo_id, revision)}"), encoding="utf-8")
