.PHONY: up test check format docs figures site image

up:
	scripts/up

test check:
	scripts/test

format:
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

docs:
	.venv/bin/dualmap settings --markdown > docs/reference/configuration.md
	.venv/bin/python -m cli.reference docs/reference/redis-keys.md
	.venv/bin/python -m cli.interfaces docs/reference
	.venv/bin/python deploy/grafana/build.py

figures:
	.venv/bin/python benchmarks/published_figures.py

site:
	.venv/bin/mkdocs build --strict --quiet

image:
	docker build -t dualmap-fleet .
