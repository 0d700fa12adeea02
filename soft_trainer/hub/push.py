"""Pushes folders to the Hub, during a run or later with `soft-trainer push DIR USER/NAME`."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
import tempfile
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError
from huggingface_hub.utils import filter_repo_objects, validate_repo_id

from soft_trainer.encoders.hub_files import public_name, published_name
from soft_trainer.errors import UserError
from soft_trainer.files import (
    ADAPTER_CONFIG,
    ADAPTER_FILES,
    ADAPTER_WEIGHTS,
    CARD,
    ENCODER_FILES,
    EVAL_RESULTS,
    MERGED_ADAPTER,
    NUMBERS,
    ONNX_FILES,
    PROFILE_FILE,
    PUSHED_ROWS,
    RECORD,
    RECORD_FORMAT,
    ROW_FILES,
    TRAINING_PICTURE,
    WHOLE_FILES,
    files_matching,
    listed_files,
    read_json,
    write_text,
)
from soft_trainer.fingerprints import file_fingerprint, list_files, model_code

logger = logging.getLogger(__name__)

REPO_TYPES = ("model", "dataset", "space")
# A pickle runs code when it is loaded, and Trainer's `training_args.bin` contains the token. The others are temporary.
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.joblib", "*.dill")
NEVER_PUSHED = (*PICKLES, ".*", "*/.*", "*.tmp", "*__pycache__*")
# Patterns of the only files that are pushed from an encoder's folder. The folder may also contain logs, ranks, rows
# and a user's files with private source code.
PUSHED_FILES = (
    *(*ENCODER_FILES, CARD, TRAINING_PICTURE, EVAL_RESULTS),
    *(RECORD, NUMBERS, "train_results.json", "eval_results.json"),
)
WEIGHTS = {"model.safetensors", "model.safetensors.index.json", ADAPTER_WEIGHTS}
_TOKENS_PAGE = "https://huggingface.co/settings/tokens"


def check_push(
    hub_model_id: str, token: str | None = None, private: bool | None = None, repo_type: str = "model"
) -> None:
    """Checks that a push to the Hub will work, before a long run. Creates the repository if it does not exist.

    Args:
        hub_model_id: `USER/NAME`.
        token: the token to push with. By default, the one from `HF_TOKEN` or `hf auth login`.
        private: True if a new repository should be private. By default, the account's setting decides.

    Raises:
        UserError: the name is invalid, the token is missing, invalid or does not permit this push, or the Hub cannot
            be reached.
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
            message += f". This token (role {role!r}) belongs to {user['name']}. Use a token with write access from "
            message += f"{_TOKENS_PAGE}, or set USER to one of {spaces}"
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
    """Pushes the files of `folder` in a single commit.

    From an encoder's folder, only PUSHED_FILES and the model's code are pushed. A local path of a teacher or of an
    adapter's base is shortened to its last part. The snippets in the pushed card load the encoder from the repository.
    After a successful push, the card in the folder is updated to match.

    The repository and the branch are created if they do not exist. Files from an earlier push that would conflict with
    this one are deleted: weights of the other type (adapter or whole encoder), and splits. The client retries the
    requests of an upload, but not the commit.

    Args:
        token, private: see `check_push`.
        revision: the branch to push to. By default, `main`.
        repo_type: one of `REPO_TYPES`.
        path_in_repo: the folder in the repository to push to.

    Returns:
        The URL of the commit.

    Raises:
        UserError: there is nothing to push, a file contains the token, or the push failed. The message for a failed
            push includes a command to push later.
    """
    folder = Path(folder)
    with stage(folder, folder, hub_model_id, token, revision, repo_type) as staged:
        url = upload(staged, folder, hub_model_id, token, private, revision, commit_message, repo_type, path_in_repo)
        card = Path(staged) / CARD
        if repo_type == "model" and not path_in_repo and card.is_file() and not card.samefile(folder / CARD):
            edited = (listed_files(folder) or {}).get(CARD) != file_fingerprint(folder / CARD)
            write_text(folder / CARD, card.read_text(encoding="utf-8"))
            if not edited:  # an edited card keeps its old hash, so that another run does not overwrite it
                list_files(folder, [folder / CARD])
    return url


def stage(
    folder: Path,
    inside: str | Path,
    repo_id: str,
    token: str | None = None,
    revision: str | None = None,
    repo_type: str = "model",
) -> tempfile.TemporaryDirectory:
    """Collects the files to push in a temporary folder: hard links, and new files where a path has to be shortened.

    The originals may change or disappear while the temporary folder is uploaded.

    Args:
        inside: the parent of the temporary folder, on the same file system, if it can be written to.

    Raises:
        UserError: there is nothing to push, or a file contains the token.
    """
    token = _client(repo_id, token, repo_type).token
    paths = _paths(folder, repo_type)
    if not paths:
        raise UserError(f"{folder}: no files to push")
    staged = tempfile.TemporaryDirectory(prefix=".push-", dir=inside if os.access(inside, os.W_OK) else None)
    for path in paths:
        name = path.relative_to(folder)
        if path.suffix != ".safetensors" and token.encode() in path.read_bytes():
            staged.cleanup()
            raise UserError(f"{path} contains the Hub token: remove it (and revoke it), then push again")
        target = Path(staged.name) / name
        target.parent.mkdir(parents=True, exist_ok=True)
        content = None
        if repo_type == "model":
            content = _public_content(path, name.as_posix(), repo_id, revision)
        if content is not None:
            target.write_text(content, encoding="utf-8")
            continue
        try:
            os.link(path, target)
        except OSError:  # the file system does not support hard links
            shutil.copy2(path, target)
    return staged


def upload(
    staged: str | Path,
    folder: Path,
    repo_id: str,
    token: str | None,
    private: bool | None,
    revision: str | None,
    commit_message: str,
    repo_type: str = "model",
    path_in_repo: str | None = None,
) -> str:
    """Pushes a staged copy of `folder` in one commit; see `push_folder`. Returns the commit's URL."""
    api = _client(repo_id, token, repo_type)
    replaced: tuple[str, ...] = ()
    if repo_type == "model":
        replaced = (*WHOLE_FILES, *ADAPTER_FILES, *ONNX_FILES)
    elif repo_type == "dataset" and folder.name == PUSHED_ROWS:  # other data sets may be pushed file by file
        replaced = ROW_FILES
    try:
        _create(api, repo_id, private, repo_type)
        if revision:
            api.create_branch(repo_id, branch=revision, repo_type=repo_type, exist_ok=True)
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=staged,
            path_in_repo=path_in_repo,
            commit_message=commit_message,
            repo_type=repo_type,
            revision=revision,
            delete_patterns=[*replaced],
        ).commit_url
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        # The client wraps a failed upload in a RuntimeError.
        cause = error.__cause__ or error if isinstance(error, RuntimeError) else error
        later = later_command(
            folder, repo_id, private, repo_type=repo_type, revision=revision, path_in_repo=path_in_repo
        )
        what = f"pushing {folder} to {repo_id} failed: {reason(cause)}"
        raise UserError(f"{what}. Nothing is lost. To push later, run: {later}") from cause


def _paths(folder: Path, repo_type: str) -> list[Path]:
    """Returns the files to push, in order."""
    paths = folder.rglob("*")
    if repo_type == "model":
        paths = _listed(folder, {folder / name for name in files_matching(folder, PUSHED_FILES)} | model_code(folder))
    names = [path.relative_to(folder).as_posix() for path in sorted(paths) if path.is_file()]
    if repo_type != "model":
        return [folder / name for name in filter_repo_objects(names, ignore_patterns=[*NEVER_PUSHED])]
    if names and WEIGHTS.isdisjoint(names):
        raise UserError(f"{folder}: no weights to push (model.safetensors or adapter_model.safetensors)")
    if RECORD in names and read_json(folder / RECORD).get("format") != RECORD_FORMAT:
        logger.warning("%s: not pushed: another version wrote this file, so it may have local paths", folder / RECORD)
        names.remove(RECORD)
    return [folder / name for name in names]


def _public_content(path: Path, name: str, repo_id: str, revision: str | None) -> str | None:
    """Returns the text to push for a file that names this repository or a local path, or None to push it as it is.

    Encoders need these paths on this machine, so they are shortened only in what is pushed.
    """
    if name == CARD:
        return named_card(path.read_text(encoding="utf-8"), repo_id, revision)
    if name == PROFILE_FILE:
        return _with_public_name(path, "teacher")
    if name in (ADAPTER_CONFIG, f"{MERGED_ADAPTER}/{ADAPTER_CONFIG}"):
        base = published_name(read_json(path).get("base_model_name_or_path"))
        if name == ADAPTER_CONFIG and base and Path(base).is_dir():
            logger.warning(
                "%s: the adapter's base, %s, exists only on this machine, so nobody else can load the adapter. "
                "Train with merge_lora=True, or push the base and train from its name",
                *(path.parent, base),
            )
        return _with_public_name(path, "base_model_name_or_path")
    return None


def _with_public_name(path: Path, key: str) -> str | None:
    """Returns a JSON file's content with a shortened path if the value of `key` is a local path, otherwise None."""
    content = read_json(path)
    name = content.get(key)
    if not name:
        return None
    # A relative path may begin where the run was started, in one of the folders around its output folder.
    local = any((folder / name).exists() for folder in path.resolve().parents)
    public = public_name(name, on_hub=not local)
    if public == name:
        return None
    return json.dumps(content | {key: public}, indent=2) + "\n"


def _listed(folder: Path, paths: set[Path]) -> set[Path]:
    """Returns the files in `paths` that `run.json` lists, or all files in `paths` if `run.json` has no list.

    Warns about files that are not listed, and about files other than the card that have changed since the run.
    """
    listed = listed_files(folder)
    if listed is None:
        return paths
    known = {folder / name for name in listed} | {folder / RECORD}
    if others := sorted(path.relative_to(folder).as_posix() for path in paths - known if path.is_file()):
        logger.warning("%s: not pushed, because run.json does not list them: %s", folder, ", ".join(others))
    changed = []
    for name, hashed in listed.items():
        if name != CARD and folder / name in paths and hashed != file_fingerprint(folder / name):
            changed.append(name)
    if changed:
        what = "changed since the run, so the results may belong to another encoder"
        logger.warning("%s: %s (%s)", folder, what, ", ".join(changed))
    return paths & known


def named_card(card: str, repo_id: str, revision: str | None) -> str:
    """Returns a card whose code snippets load the encoder from this repository."""
    match = re.search(r'load_encoder\(("[^"]+"(?:, revision="[^"]+")?)[,)]', card)
    if match is None:
        return card
    arguments = f'"{repo_id}"'
    if revision:
        arguments += f', revision="{revision}"'
    return card.replace(f"({match[1]}", f"({arguments}")


def later_command(folder: str | Path, hub_model_id: str, private: bool | None = None, **options: str | None) -> str:
    """Returns the shell command that pushes `folder` later with these `options`."""
    command = ["soft-trainer", "push", str(folder), hub_model_id]
    if private:
        command.append("--private")
    for name, value in options.items():
        if value and (name, value) != ("repo_type", "model"):
            command += [f"--{name}", value]
    return shlex.join(command)


def _create(api: HfApi, repo_id: str, private: bool | None, repo_type: str) -> None:
    """Creates the repository if it does not exist."""
    sdk = "static" if repo_type == "space" else None
    api.create_repo(repo_id, private=private, repo_type=repo_type, exist_ok=True, space_sdk=sdk)


def _client(repo_id: str, token: str | None, repo_type: str) -> HfApi:
    """Returns a client for `token` or, by default, the stored token. Raises UserError if there is no token.

    Also raises UserError unless `repo_id` is `USER/NAME`.
    """
    option = "push_data_to_hub" if repo_type == "dataset" else "hub_model_id"
    token = token or get_token()
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"{option}={repo_id!r}: {str(error).splitlines()[0]}") from error
    if repo_id.count("/") != 1:
        raise UserError(f"{option}={repo_id!r}: expected USER/NAME, where USER is you or one of your organisations")
    if not token:
        raise UserError(f"no token for the Hub: run `hf auth login` or set HF_TOKEN to one from {_TOKENS_PAGE}")
    return HfApi(token=token)


def reason(error: Exception) -> str:
    """Describes an error in one line, with advice if it is a common error from the Hub."""
    if not isinstance(error, HfHubHTTPError):
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    status = error.response.status_code
    message = error.server_message or error.response.reason_phrase
    known = {
        401: f"the token is invalid; create one at {_TOKENS_PAGE}",
        403: "the token is not allowed to write there",
        404: "there is no such repository",
    }
    if status in known:
        return f"{known[status]} ({status}: {message})"
    return f"the Hub answered {status}: {message}"
