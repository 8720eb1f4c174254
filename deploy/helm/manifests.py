"""Plain manifests of the chart's examples: `python deploy/helm/manifests.py` writes deploy/kubernetes/*.yaml.

`make docs` runs it. Helm's own code renders them, from the package helm-python-sdk of the test extra.
"""

from __future__ import annotations

import re
from pathlib import Path

import helm_python
import yaml

CHART = Path(__file__).parent / "dualmap"
FOLDER = CHART.parents[1] / "kubernetes"

_HELMS_OWN = re.compile(r"^ *(app\.kubernetes\.io/managed-by|helm\.sh/chart): .*\n", re.MULTILINE)


def rendered(values: Path) -> str:
    """All manifests of an example, without the labels that are for Helm."""
    name = values.stem.removeprefix("values-")
    with helm_python.Chart.load(CHART) as chart:
        files = chart.render(yaml.safe_load(values.read_text("utf-8")), name="dualmap")
    documents = [
        document.strip()
        for path, text in sorted(files.items())
        if path.endswith(".yaml")
        for document in re.split(r"^---$", text, flags=re.MULTILINE)
        if yaml.safe_load(document)
    ]
    head = (
        f"# {values.relative_to(CHART.parents[2])}, rendered by deploy/helm/manifests.py: do not edit by hand.\n"
        f"#   kubectl apply --namespace NAMESPACE -f deploy/kubernetes/{name}.yaml\n"
        "# After an edit of the settings: kubectl rollout restart deployment/dualmap-router deployment/dualmap-worker"
    )
    return _HELMS_OWN.sub("", "\n---\n".join([head, *documents]) + "\n")


def examples() -> dict[str, str]:
    """The text of each file, by its name."""
    return {f"{path.stem.removeprefix('values-')}.yaml": rendered(path) for path in sorted(CHART.glob("values-*.yaml"))}


if __name__ == "__main__":
    for name, text in examples().items():
        (FOLDER / name).write_text(text, "utf-8")
