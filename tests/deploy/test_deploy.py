"""The files of deploy/ are what docker compose, Kubernetes and Grafana take, and name what there is."""

import json
import re
import subprocess
import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def checked(*command):
    done = subprocess.run([Path(sys.executable).with_name(command[0]), *command[1:]], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def lost(given, kept, path=""):
    """What of `given` is not in `kept`, by its path; but for nulls."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [found for key, value in given.items() if value is not None
                for found in lost(value, kept.get(key), f"{path}/{key}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [found for index, value in enumerate(given) for found in lost(value, kept[index], f"{path}/{index}")]
    return [] if given == kept else [path]


def test_the_compose_file():
    checked("check-jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml")


def test_the_manifest():
    checked("kubernetes-validate", "--strict", DEPLOY / "kubernetes.yaml")


def test_a_wrong_word_is_found(tmp_path):
    for file, word, command in (("compose.yaml", "read_only:", ["check-jsonschema", "--builtin-schema",
                                                               "vendor.compose-spec"]),
                                ("kubernetes.yaml", "readOnlyRootFilesystem:", ["kubernetes-validate", "--strict"])):
        (tmp_path / file).write_text((DEPLOY / file).read_text().replace(word, word.replace("ead", "aed")))
        command[0] = Path(sys.executable).with_name(command[0])
        assert subprocess.run([*command, tmp_path / file], capture_output=True, check=False).returncode != 0


def test_the_dashboard_is_one_of_grafanas():
    register_default_plugins()
    given = json.loads((DEPLOY / "grafana.json").read_text())
    kept = json.loads(JSONEncoder().encode(Dashboard.from_json(given)))
    assert lost(given, kept) == []


def test_all_start_the_server_as_the_image_does():
    entry = json.loads(re.search(r"ENTRYPOINT (.*)", (ROOT / "Dockerfile").read_text())[1])
    for file in ("compose.yaml", "kubernetes.yaml"):
        words = re.search(r"(?:entrypoint|command): \[(lowkv.*)\]", (DEPLOY / file).read_text())[1].split(", ")
        assert words[:2] == entry[:2] and words[-2:] == entry[-2:] and words[2] == "--keep"
