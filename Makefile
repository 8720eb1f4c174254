.PHONY: up test check format docs image

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
	.venv/bin/python deploy/grafana/build.py

image:
	docker build -t dualmap-fleet .
