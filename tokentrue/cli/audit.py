"""tokentrue audit FILE: re-checks certificates, prefix identity and coverage of exported samples."""

from dataclasses import asdict
from typing import Annotated

from typer import Option

from tokentrue.cli.common import AsJson, SamplesFile, count_items, pluralise, print_json, show_share
from tokentrue.json_types import JsonObject


def command(
    file: SamplesFile, as_json: AsJson = False, limit: Annotated[int, Option(help="findings to print")] = 20
) -> int:
    """Re-check exported samples; exit 1 where something does not hold, and say where."""
    from tokentrue.samples import AuditFinding, audit_exported, read_exported
    from tokentrue.samples.images import ImageFolder

    result = audit_exported(count_items(read_exported(file), "sample", quiet=as_json), ImageFolder(file))
    if not result.samples:
        result.findings.append(AuditFinding(sample=file.name, what="holds no sample: there is nothing to check"))
    if as_json:
        counts = {name: getattr(result, name) for name in ("ok", "samples", "tokens", "sampled", "trained", "coverage")}
        findings = [asdict(finding) for finding in result.findings]
        images: JsonObject = {"images": len(result.images), "image_files_checked": result.are_files_checked}
        shown = images if result.images else {}
        print_json({**counts, **shown, "sessions": len(result.sessions), "findings": findings})
        return 0 if result.ok else 1
    alike: dict[str, list[AuditFinding]] = {}  # of whole samples: one line for all of a doubled file
    for finding in result.findings:
        key = finding.what if finding.start is None and "session " not in finding.sample else str(finding)
        alike.setdefault(key, []).append(finding)
    for first, *others in list(alike.values())[:limit]:
        more = f" (and {pluralise(len(others), 'more sample')})" if others else ""
        print(f"{first}{more}")
    if len(alike) > limit:
        print(f"… and {len(alike) - limit} more (--limit)")
    verdict = "OK: verified" if result.ok else f"FAIL: {pluralise(len(result.findings), 'finding')} in"
    counted = f"{pluralise(result.samples, 'sample')} of {pluralise(len(result.sessions), 'session')}"
    trained = f"{pluralise(result.tokens, 'token')}, {result.trained:,} trained, coverage {show_share(result.coverage)}"
    left = ""
    if result.untrained:
        left = f"; {show_share(1 - result.coverage)} of sampled tokens are untrained ({', '.join(result.untrained)})"
    print(f"{verdict} {counted}, {trained}{left}")
    if result.images:
        files = "with their files" if result.are_files_checked else "references only: no files beside the samples"
        print(f"{pluralise(len(result.images), 'image')}, {files}")
    return 0 if result.ok else 1
