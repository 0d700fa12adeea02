# `make check test` before a commit; `make slow` before a release.
.PHONY: check test slow docs
check:  ## lint, formatting and types
	ruff check .
	ruff format --check .
	basedpyright
test:  ## fast tests: about two minutes on two cores
	pytest -q
slow:  ## whole runs, two processes, the wheel
	pytest -q -m slow
docs:  ## the site, in site/
	sphinx-build -W -b html -c docs . site
