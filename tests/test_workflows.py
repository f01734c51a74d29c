"""Check .github, the Makefile, .ci/run and the files about the project at the top.

actionlint checks the rest of the workflows' syntax.
"""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from containers import images

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.y*ml"))
CI_RUN = ROOT / ".ci" / "run"
each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)


def load(path: Path) -> dict[str, Any]:
    document = yaml.safe_load(path.read_text())
    # YAML 1.1 reads the key `on` as true.
    document["on"] = document.pop(True, document.get("on"))
    return document


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in load(path)["jobs"].values():
        yield from job["steps"]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def targets_called(script: str) -> set[str]:
    return set(re.findall(r"^\s*(?:sudo .* )?make ([a-z-]+)", script, flags=re.MULTILINE))


@each_workflow
def test_least_permissions(path: Path) -> None:
    document = load(path)
    assert document["permissions"] == {"contents": "read"}
    asked = {
        name: job["permissions"] for name, job in document["jobs"].items() if "permissions" in job
    }
    writes = ("contents", "pull-requests", "packages", "id-token", "attestations")
    assert asked == ({"build": dict.fromkeys(writes, "write")} if path.name == "images.yml" else {})
    events = document["on"]
    assert "pull_request_target" not in events
    assert "workflow_run" not in events


@each_workflow
def test_every_action_is_pinned_by_commit_and_says_its_version(path: Path) -> None:
    uses = re.findall(r"^\s*(?:- )?uses: (.*)$", path.read_text(), flags=re.MULTILINE)
    assert len(uses) == len([step for step in steps(path) if "uses" in step])
    for action in uses:
        assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


@each_workflow
def test_checkout_leaves_no_credentials(path: Path) -> None:
    for step in steps(path):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


@each_workflow
def test_every_job_has_a_time_limit_and_a_fixed_runner(path: Path) -> None:
    document = load(path)
    assert document["concurrency"]["cancel-in-progress"] is True
    for job in document["jobs"].values():
        assert (
            0 < job["timeout-minutes"] <= (180 if path.name == "images.yml" else 90)
        )  # a ROCm base is tens of GB
        assert not job["runs-on"].endswith("-latest")


@each_workflow
def test_no_expression_is_pasted_into_a_script(path: Path) -> None:
    """A branch name or a title in ${{ }} would be run as shell."""
    assert not [step["run"] for step in steps(path) if "${{" in step.get("run", "")]


@each_workflow
def test_make_targets_exist(path: Path) -> None:
    called = {target for step in steps(path) for target in targets_called(step.get("run", ""))}
    assert called
    assert called <= make_targets()


def test_workflows_and_ci_run_check_the_same() -> None:
    checks = {"lint", "test", "test-integration", "docs"}
    in_workflows = {
        target
        for path in WORKFLOWS
        for step in steps(path)
        for target in targets_called(step.get("run", ""))
    }
    assert checks <= in_workflows
    assert checks <= targets_called(CI_RUN.read_text()) <= make_targets()


def test_tested_pythons_are_supported_ones() -> None:
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    tested = load(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]["test"]["strategy"]["matrix"][
        "python"
    ]
    assert oldest == f">={tested[0]}"
    assert tested == ["3.11", "3.12", "3.13"]


def test_the_same_hashes_of_strings_in_every_run() -> None:
    assert "export PYTHONHASHSEED := 0" in (ROOT / "Makefile").read_text()


def test_every_image_can_be_built_on_demand() -> None:
    (path,) = (path for path in WORKFLOWS if path.name == "images.yml")
    assert set(load(path)["on"]["workflow_dispatch"]["inputs"]["image"]["options"]) == set(
        images.load()
    )


def test_images_are_pushed_with_provenance_sbom_and_a_pull_request() -> None:
    path = ROOT / ".github" / "workflows" / "images.yml"
    document, actions = load(path), {}
    assert {"workflow_dispatch", "schedule", "push"} == set(document["on"])
    assert set(document["on"]["push"]) == {"tags"}
    for step in steps(path):
        if "attest@" in step.get("uses", ""):
            kind = "sbom" if "sbom-path" in step["with"] else "provenance"
            actions[kind] = step["with"]["subject-digest"], step["with"]["push-to-registry"]
        elif "create-pull-request@" in step.get("uses", ""):
            actions["pull request"] = step["with"]["add-paths"]
    digest = "${{ steps.pushed.outputs.digest }}"
    assert actions == {
        "provenance": (digest, True),
        "sbom": (digest, True),
        "pull request": "containers/images.lock.yaml",
    }


def test_digest_of_the_pushed_image(tmp_path: Path) -> None:
    """Run the workflow's script that reads the lock after a push."""
    (script,) = (step["run"] for step in steps(WORKFLOWS[1]) if step.get("id") == "pushed")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to(sys.executable)
    for name in ("containers", "launch"):
        (tmp_path / name).symlink_to(ROOT / name)
    env = {**os.environ, "IMAGE": "sandbox", "GITHUB_OUTPUT": str(tmp_path / "output")}
    subprocess.run(["bash", "-ec", script], cwd=tmp_path, env=env, check=True)
    output = dict(line.split("=", 1) for line in (tmp_path / "output").read_text().splitlines())
    name, _, digest = output["reference"].partition("@")
    assert (output["name"], output["digest"]) == (name, digest)


def test_integration_tests_run_as_root() -> None:
    """Only root can make device nodes, and skip_without fails in CI."""
    scripts = [step.get("run", "") for step in steps(WORKFLOWS[0])]
    (script,) = (s for s in scripts if "test-integration" in targets_called(s))
    assert script.startswith("sudo --preserve-env=CI")


def test_citation_and_changelog_have_the_version_of_pyproject() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    released = re.findall(
        r"^## \[([\d.]+)\] - \d{4}-\d\d-\d\d$",
        (ROOT / "CHANGELOG.md").read_text(),
        flags=re.MULTILINE,
    )
    assert released[0] == version
