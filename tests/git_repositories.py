"""Makes small git repositories with the program `git`."""

import subprocess

PERSON = ("-c", "user.name=Ann", "-c", "user.email=ann@example.org", "-c", "protocol.file.allow=always")


def git(folder, *words):
    """Runs git and returns what it prints."""
    command = ["git", *PERSON, "-C", str(folder), *map(str, words)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def committed(folder):
    """Makes a folder a repository with one commit, and returns the folder."""
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", "Start")
    return folder
