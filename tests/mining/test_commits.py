import time

import pytest

from soft_trainer.mining.commits import query_of, reason_against

SUBJECTS = [
    ("feat(parser)!: Read dates of two digits (#123)", "Read dates of two digits"),
    ("fix: drop the cache", "drop the cache"),
    ("ENH: faster sums", "faster sums"),
    ("Fix the parser, closes #12 and #13", "Fix the parser"),
    ("Fixes GH-12: keep empty lines", "keep empty lines"),
    ("PROJ-77: keep empty lines.", "keep empty lines"),
    ("[ci skip] Say what is wrong :sparkles:", "Say what is wrong"),
    ("🔥 Remove the old loader (org/other#4)", "Remove the old loader"),
    ("Thank ann@example.org for `#[inline]`, see https://example.org/x", "Thank for `#[inline]`, see"),
    ("Add support for Python: 3 and 4", "Add support for Python: 3 and 4"),
    ("Colour #fff is white", "Colour #fff is white"),
    ("fix: 修复日期解析的错误。(#12)", "修复日期解析的错误"),
]


@pytest.mark.parametrize(("subject", "query"), SUBJECTS)
def test_a_subject_is_cleaned(subject, query):
    assert query_of(subject) == query


@pytest.mark.parametrize("part", ["[", "(#1", "fix #1, ", "bump ", ":a", "a@b.", "[no "])
def test_a_message_of_a_megabyte_takes_no_time(part):
    message = part * (1_000_000 // len(part))
    started = time.process_time()
    query_of(message)
    reason_against(message, "", "")
    assert time.process_time() - started < 1


REASONS = [
    ("Add a parser of dates", "", ""),
    ("Bump the limit of open files", "", ""),
    ("Update the versions table when a row changes", "", ""),
    ("Release the lock after an error", "", ""),
    ("Set the version header of every response", "", ""),
    ("Version 2 of the protocol is refused without a key", "", ""),
    ("Fix typos", "", "subject under 3 words"),
    ("修复日期解析", "", ""),
    ("PDF を読む", "", ""),
    ("修正", "", "subject under 3 words"),
    ("날짜 분석 오류 수정", "", ""),
    ("Исправить ошибку", "", "subject under 3 words"),
    ("Merge branch 'main' into dates", "", "merge"),
    ("Merge pull request #12 from ann/dates", "", "merge"),
    ("Merged in dates (pull request #7)", "", "merge"),
    ("Merge branches of the tree into one", "", ""),
    ("Merge pull requests in the order of their dates", "", ""),
    ('Revert "Add a parser of dates"', "", "revert"),
    ("Undo the last change of dates", "", "revert"),
    ("Bring back the old parser\n\nThis reverts commit 0123456789.", "", "revert"),
    ("v1.2.3", "", "version bump"),
    ("Release 1.2.0 of the package", "", "version bump"),
    ("Prepare for the next release 2.0", "", "version bump"),
    ("Update requests from 2.1 to 2.2", "", "version bump"),
    ("chore(release): 1.4.2 and notes", "", "version bump"),
    ("Bump lodash from 4.17.15 to 4.17.21 in /packages/web (#12)", "", "version bump"),
    ("Bump the dev dependencies", "", "version bump"),
    ("Update the version number", "", "version bump"),
    ("Add a parser of dates", "Jane <jane@snyk.io>", ""),
    ("Add a parser of dates", "Joe <joe@renovate-bot.example>", ""),
    ("Update the lock file of tests", "snyk-bot <snyk-bot@snyk.io>", "bot"),
    ("Update the lock file of tests", "Mend Renovate <bot@renovateapp.com>", "bot"),
    ("Update the lock file of tests", "Updates <49699333+updates[bot]@users.noreply.github.com>", "bot"),
    ("Update the lock file of tests", "dependabot[bot] <x@users.noreply.github.com>", "bot"),
    ("Format all the files", "pre-commit-ci <y@example.org>", "bot"),
    ("Add a parser of dates", "Abbot Costello <abbot@example.org>", ""),
]


@pytest.mark.parametrize(("message", "author", "reason"), REASONS)
def test_uninformative_commits_are_skipped(message, author, reason):
    assert reason_against(message, author or "Ann <a@example.org>", "GitHub <noreply@github.com>") == reason
