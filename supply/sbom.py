"""Whether a bill of materials (CycloneDX JSON) names what is installed, no more and no less.

    python -m supply.sbom build/sbom.cdx.json

The file is written, and checked against CycloneDX's schema, by cyclonedx-py (`./run.sh sbom`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from supply.lock import installed_here


def differences(document: Mapping[str, Any], installed: Mapping[str, str]) -> list[str]:
    """A line for each package that only one of the two has, or whose versions differ."""
    if document.get("bomFormat") != "CycloneDX":
        return ["not a CycloneDX document"]
    parts = [*document["components"], document["metadata"]["component"]]
    listed: dict[str, str] = {canonicalize_name(part["name"]): part["version"] for part in parts}
    names = sorted(listed.keys() | installed.keys())
    return [
        f"{name}: {installed.get(name, 'nothing')} is installed, "
        f"the bill says {listed.get(name, 'nothing')}"
        for name in names
        if listed.get(name) != installed.get(name)
    ]


def main() -> int:
    """Print what differs; the exit status."""
    path = Path(sys.argv[1])
    document = json.loads(path.read_text(encoding="utf-8"))
    found = differences(document, installed_here())
    for line in found:
        print(f"sbom: {line}", file=sys.stderr)
    if not found:
        print(f"sbom: {path} names all {len(document['components'])} installed packages")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
