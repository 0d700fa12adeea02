"""Pushes folders to the Hub, during a run or later with `soft-trainer push DIR USER/NAME`."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import HfApi, RepoCard, get_token
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, HTTPError
from huggingface_hub.utils import filter_repo_objects, validate_repo_id

from soft_trainer.errors import UserError
from soft_trainer.hub.files import public_name, published_name
from soft_trainer.system.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CARD,
    ENCODER_FILES,
    MERGED_ADAPTER,
    NUMBERS,
    PROFILE_FILE,
    RECORD,
    RECORD_FORMAT,
    TRAINING_PICTURE,
    WRITTEN,
    files_matching,
    is_edited,
    read_json,
    signed,
    write_text,
)
from soft_trainer.system.fingerprints import model_code

logger = logging.getLogger(__name__)

REPO_TYPES = ("model", "dataset", "space")
# A pickle runs code when it is loaded, and Trainer's `training_args.bin` contains the token. The others are temporary.
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.joblib", "*.dill")
NEVER_PUSHED = (*PICKLES, ".*", "*/.*", "*.tmp", "*__pycache__*")
# Patterns of the only files that are pushed from an encoder's folder. The folder may also contain logs, ranks, rows
# and a user's files with private source code.
PUSHED_FILES = (
    *(*ENCODER_FILES, CARD, TRAINING_PICTURE),
    *(RECORD, NUMBERS, "train_results.json", "eval_results.json"),
)
WEIGHTS = {"model.safetensors", "model.safetensors.index.json", ADAPTER_WEIGHTS}
# The files that name another encoder, maybe by a local path, with the key of the name.
_NAMING_ENCODERS = {PROFILE_FILE: "teacher"}
_NAMING_ENCODERS |= dict.fromkeys((ADAPTER_CONFIG, f"{MERGED_ADAPTER}/{ADAPTER_CONFIG}"), "base_model_name_or_path")
_TOKENS_PAGE = "https://huggingface.co/settings/tokens"


@dataclass
class Repository:
    """A repository on the Hub to push to. It is created if it does not exist.

    Args:
        name: `USER/NAME`.
        token: the token to push with. By default, the one from `HF_TOKEN` or `hf auth login`.
        private: True if a new repository should be private. By default, the account's setting decides.
        revision: the branch to push to, which is created if it does not exist. By default, `main`.
        repo_type: one of `REPO_TYPES`.
        path_in_repo: the folder in the repository to push to.

    Raises:
        UserError: the name is invalid, or there is no token.
    """

    name: str
    token: str | None = field(default=None, repr=False)
    private: bool | None = None
    revision: str | None = None
    repo_type: str = "model"
    path_in_repo: str | None = None

    def __post_init__(self):
        if (self.name or "").count("/") != 1:
            raise UserError(
                f"hub_model_id={self.name!r}: expected USER/NAME, where USER is you or one of your organisations"
            )
        try:
            validate_repo_id(self.name)
        except HFValidationError as error:
            raise UserError(f"hub_model_id={self.name!r}: {str(error).splitlines()[0]}") from error
        self.token = self.token or get_token()
        if not self.token:
            raise UserError(f"no token for the Hub: run `hf auth login` or set HF_TOKEN to one from {_TOKENS_PAGE}")
        self.api = HfApi(token=self.token)

    def check(self) -> None:
        """Checks that a push will work, before a long run.

        Raises:
            UserError: the token is invalid or does not permit this push, or the Hub cannot be reached.
        """
        user = None
        try:
            user = self.api.whoami()
            self._create()
            self.api.auth_check(self.name, repo_type=self.repo_type, write=True)
        except (HTTPError, OSError) as error:
            message = f"cannot push to {self.name}: {reason(error)}"
            if user:
                spaces = ", ".join([user["name"], *(group["name"] for group in user.get("orgs", []))])
                role = user.get("auth", {}).get("accessToken", {}).get("role", "unknown")
                message += (
                    f". This token (role {role!r}) belongs to {user['name']}. Use a token with write access from "
                )
                message += f"{_TOKENS_PAGE}, or set USER to one of {spaces}"
            raise UserError(message) from error

    def _create(self) -> None:
        sdk = "static" if self.repo_type == "space" else None
        self.api.create_repo(self.name, private=self.private, repo_type=self.repo_type, exist_ok=True, space_sdk=sdk)

    def push(self, folder: str | Path, message: str = "Upload") -> str:
        """Pushes the files of `folder` in a single commit.

        From an encoder's folder, only PUSHED_FILES and the model's code are pushed. A local path of a teacher or of an
        adapter's base is shortened to its last part. The snippets in the pushed card load the encoder from the
        repository. After a successful push, the card in the folder is updated to match.

        A card in the repository without the line `WRITTEN` is kept.

        From an earlier push, an encoder's files that this push lacks are deleted, such as results or a
        vocabulary. The client retries the requests of an upload, but not the commit.

        Returns:
            The URL of the commit.

        Raises:
            UserError: there is nothing to push, a file contains the token, or the push failed. The message for a
                failed push includes a command to push later.
        """
        folder = Path(folder)
        with self.stage(folder, folder) as staged:
            url = self.upload(staged, folder, message)
            card = Path(staged) / CARD
            if self.repo_type == "model" and not self.path_in_repo and card.is_file():
                write_text(folder / CARD, card.read_text(encoding="utf-8"))
        return url

    def stage(self, folder: Path, inside: str | Path) -> tempfile.TemporaryDirectory:
        """Collects the files to push in a temporary folder: hard links, and new files where a path is shortened.

        The originals may change or disappear while the temporary folder is uploaded.

        Args:
            inside: the parent of the temporary folder, on the same file system, if it can be written to.

        Raises:
            UserError: there is nothing to push, or a file contains the token.
        """
        paths = _paths(folder, self.repo_type)
        if not paths:
            raise UserError(f"{folder}: no files to push")
        staged = tempfile.TemporaryDirectory(prefix=".push-", dir=inside if os.access(inside, os.W_OK) else None)
        for path in paths:
            if path.suffix != ".safetensors" and self.token.encode() in path.read_bytes():
                staged.cleanup()
                raise UserError(f"{path} contains the Hub token: remove it (and revoke it), then push again")
            name = path.relative_to(folder).as_posix()
            target = Path(staged.name) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            content = None
            if self.repo_type == "model":
                content = self._public_content(path, name)
            if content is not None:
                target.write_text(content, encoding="utf-8")
                continue
            try:
                os.link(path, target)
            except OSError:  # the file system does not support hard links
                shutil.copy2(path, target)
        return staged

    def _public_content(self, path: Path, name: str) -> str | None:
        """Returns the text to push for a file that names this repository or a local path, or None to push it as it is.

        Encoders need these paths on this machine, so they are shortened only in what is pushed.
        """
        if name == CARD:
            return self._named_card(path.read_text(encoding="utf-8"))
        if name not in _NAMING_ENCODERS:
            return None
        content = read_json(path)
        key = _NAMING_ENCODERS[name]
        encoder = content.get(key)
        if not encoder:
            return None
        if name == ADAPTER_CONFIG and Path(published_name(encoder)).is_dir():
            logger.warning(
                "%s: the adapter's base, %s, exists only on this machine, so nobody else can load the adapter. "
                "Train with merge_lora=True, or push the base and train from its name",
                *(path.parent, encoder),
            )
        # A relative path may begin where the run was started, in one of the folders around its output folder.
        local = any((folder / encoder).exists() for folder in path.resolve().parents)
        public = public_name(encoder, on_hub=not local)
        if public == encoder:
            return None
        return json.dumps(content | {key: public}, indent=2) + "\n"

    def _named_card(self, card: str) -> str:
        """Returns a card whose code snippets load the encoder from this repository. This does not count as an edit."""
        match = re.search(r'load_encoder\(("[^"]+"(?:, revision="[^"]+")?)[,)]', card)
        if match is None:
            return card
        arguments = f'"{self.name}"'
        if self.revision:
            arguments += f', revision="{self.revision}"'
        named = card.replace(f"({match[1]}", f"({arguments}")
        return named if is_edited(card) else signed(named)

    def _keep_edited_card(self, card: Path) -> None:
        """Does not push a generated card over a card of the repository that its owner has made their own."""
        name = f"{self.path_in_repo}/{CARD}" if self.path_in_repo else CARD
        try:
            present = self.api.hf_hub_download(self.name, name, repo_type=self.repo_type, revision=self.revision)
        except EntryNotFoundError:
            return
        theirs = Path(present).read_text(encoding="utf-8")
        if RepoCard(theirs).text.strip() and WRITTEN not in theirs and WRITTEN in card.read_text(encoding="utf-8"):
            card.unlink()
            logger.warning("%s: keeping %s; delete it there to push the card of these weights", self.name, name)

    def upload(self, staged: str | Path, folder: Path, message: str) -> str:
        """Pushes a staged copy of `folder` in one commit; see `push`. Returns the commit's URL."""
        replaced: tuple[str, ...] = ()
        if self.repo_type == "model":
            replaced = tuple(name for name in PUSHED_FILES if name != CARD)  # a checkpoint has no card
        destination = {"repo_type": self.repo_type, "revision": self.revision}
        try:
            self._create()
            if self.revision:
                self.api.create_branch(self.name, branch=self.revision, repo_type=self.repo_type, exist_ok=True)
            if (card := Path(staged) / CARD).is_file():
                self._keep_edited_card(card)
            return self.api.upload_folder(
                repo_id=self.name,
                folder_path=staged,
                path_in_repo=self.path_in_repo,
                commit_message=message,
                delete_patterns=[*replaced],
                **destination,
            ).commit_url
        except (HTTPError, OSError, ValueError, RuntimeError) as error:
            # The client wraps a failed upload in a RuntimeError.
            cause = error.__cause__ or error if isinstance(error, RuntimeError) else error
            command = ["soft-trainer", "push", str(folder), self.name]
            if self.private:
                command.append("--private")
            for name, value in {**destination, "path_in_repo": self.path_in_repo}.items():
                if value and (name, value) != ("repo_type", "model"):
                    command += [f"--{name}", value]
            what = f"pushing {folder} to {self.name} failed: {reason(cause)}"
            raise UserError(f"{what}. Nothing is lost. To push later, run: {shlex.join(command)}") from cause


def _paths(folder: Path, repo_type: str) -> list[Path]:
    """Returns the files to push. From an encoder's folder, these are the files that a run writes."""
    if repo_type != "model":
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        return [folder / name for name in filter_repo_objects(files, ignore_patterns=[*NEVER_PUSHED])]
    names = {*files_matching(folder, PUSHED_FILES), *model_code(folder)}
    if names and WEIGHTS.isdisjoint(names):
        raise UserError(f"{folder}: no weights to push (model.safetensors or adapter_model.safetensors)")
    if RECORD in names and read_json(folder / RECORD).get("format") != RECORD_FORMAT:
        logger.warning("%s: not pushed: another version wrote this file, so it may have local paths", folder / RECORD)
        names.remove(RECORD)
    return [folder / name for name in sorted(names)]


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
