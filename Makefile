.PHONY: up test check coverage format docs figures site image

up:
	scripts/up

test check:
	scripts/test

coverage: # all tests, and fails where they cover less of the branches than they did
	scripts/test --cov --cov-report=term --numprocesses=auto --maxprocesses=4 --dist=loadfile --no-loadscope-reorder

format:
	scripts/with test ruff check --fix .
	scripts/with test ruff format .

docs:
	scripts/with '' python -m scripts.documents docs
	scripts/with '' python deploy/grafana/build.py
	scripts/with '' python deploy/helm/schema.py
	scripts/with '' python deploy/helm/version.py
	scripts/with test python deploy/helm/manifests.py

figures:
	scripts/with evaluation python benchmarks/published_figures.py

site:
	scripts/with site mkdocs build --strict --quiet

image: # make image EXTRAS=tokens,tracing; it has the tag of its version, which the chart takes, and latest
	docker build --build-arg EXTRAS=$(EXTRAS) -t dualmap-fleet \
	    -t dualmap-fleet:$$(sed -n 's/^version = "\([^"]*\)".*/\1/p' pyproject.toml) .
