"""Builds small Git repositories with pygit2."""

import os

import pygit2 as git

FOLDER, LINK, SUBMODULE, FILE = 0o040000, 0o120000, 0o160000, 0o100644


class Repository:
    """A Git repository to which tests add commits, from dicts of files. Each commit is an hour later than the last."""

    def __init__(self, path, bare=False):
        self.path = path
        self.git = git.init_repository(str(path), bare=bare, initial_head="main")
        self.time = 1_700_000_000

    def commit(self, message, files, parents=None, author="Ann", branch="refs/heads/main", others=()):
        self.time += 3600
        person = git.Signature(author, "ann@example.org", self.time)
        if parents is None:
            parents = [] if self.git.head_is_unborn else [self.git.head.target]
        return self.git.create_commit(branch, person, person, message, self._tree(files, others), parents)

    def link(self, path):
        """Makes a linked worktree in a new folder, with one commit if the repository has none."""
        if self.git.head_is_unborn:
            self.commit("Start", {"a.py": "x"})
        if not os.path.exists(f"{self.git.path}/index"):
            self.git.index.write()
        return self.git.add_worktree(os.path.relpath(path, self.path).replace("/", "-"), str(path))

    def _tree(self, files, others=()):
        builder, folders = self.git.TreeBuilder(), {}
        for path, text in files.items():
            folder, _, rest = path.partition("/")
            if rest:
                folders.setdefault(folder, {})[rest] = text
            else:
                builder.insert(path, self.git.create_blob(text.encode()), FILE)
        for name, inner in folders.items():
            builder.insert(name, self._tree(inner), FOLDER)
        for name, mode, oid in others:
            builder.insert(name, oid, mode)
        return builder.write()


def function(name, *lines, document=""):
    body = [f'"""{document}"""'] if document else []
    return "\n".join([f"def {name}(value):", *(f"    {line}" for line in [*body, *lines, "return value"])]) + "\n\n\n"


def grown(path, commits=20, **options):
    """Makes a repository whose commits change the functions f0 to f4 in turn. Commit N writes the number 1000 + N."""
    repository = Repository(path, **options)
    numbers = [0] * 5

    def files():
        return {
            f"src/f{i}.py": function(f"f{i}", f"value += {numbers[i]}", document=f"Adds the {i}th number.")
            for i in range(5)
        }

    repository.commit("Start with five functions of numbers", files())
    for number in range(1, commits + 1):
        numbers[number % 5] = 1000 + number
        repository.commit(f"Make the sum number {number} larger (#{number})", files())
    return repository
