"""The tables of docs/quality, from the CSV's rows. Used by eval/quality.py.

A table goes between the marks `<!-- NAME -->` and `<!-- /NAME -->` of the pages in docs/quality (or in another --out),
where there is one. `find` gives the figures of a scheme under the
usual setting, or under a changed one.
"""

import math
import re

import quality_reference
import quality_schemes as schemes
from paths import ROOT
from weights import WEIGHTS

COMMAND = ROOT / "cli/schemes/quality.cpp"


def fill(document, begin, end, text):
    """Puts `text` between two marks."""
    if document.exists():
        marks = re.compile(f"({re.escape(begin)}\n).*?( *{re.escape(end)})", re.S)
        document.write_text(marks.sub(lambda m: m[1] + text + "\n" + m[2], document.read_text()))


def fill_documents(out, name, text):
    for document in out.glob("*.md"):
        fill(document, f"<!-- {name} -->", f"<!-- /{name} -->", text)
    # Another model's folder lies in the first one's, whose pages have its tables under the folder's name.
    for document in out.parent.glob("*.md"):
        fill(document, f"<!-- {out.name}-{name} -->", f"<!-- /{out.name}-{name} -->", text)


def fill_command(find):
    """What `lowkv schemes` prints of each preset: two digits, as many as the measurement carries."""
    rows = [r for s in [*schemes.PRESETS, *schemes.CALIBRATED] if (r := find(s))]
    fill(COMMAND, "// clang-format off: written by eval/quality.py", "// clang-format on", "\n".join(
        f'    Quality{{"{r["scheme"]}", "{two_digits(r["mean_kld"])}", '
        f'"{tenths(r["perplexity_change_percent"])} %"}},' for r in rows))


def tenths(value):
    return f"{value:+.1f}".replace("-0.0", "0.0").replace("+0.0", "0.0")


def two_digits(value):
    return f"{value:.{max(0, 1 - math.floor(math.log10(value)))}f}"


def shown(scheme):
    return scheme.replace("+", ", ")


def main_table(out, find, more):
    """Every scheme; `more` are schemes that were measured for it beside its own."""
    rows = [r for s in dict.fromkeys([*schemes.TABLE, *more]) if (r := find(s))]
    lines = ["| scheme | bits per element | perplexity % | mean KLD | 99.9 % KLD | same top-1 % "
             "| KV MiB |", "|---|---|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda r: (r["bits"], r["mean_kld"])):
        lines.append(
            f"| {shown(row['scheme'])} | {row['bits']:.2f} "
            f"| {row['perplexity_change_percent']:+.2f} | {row['mean_kld']:.5f} "
            f"± {row['mean_kld_error']:.5f} | {row['kld_p999']:.3f} "
            f"| {100 * row['same_top1']:.1f} | {row['kv_bytes'] / 2**20:.2f} |")
    builds = {}
    for row in rows:
        builds.setdefault(row["plugin"], []).append(shown(row["scheme"]))
    if len(builds) > 1:  # the largest share first
        of = "; ".join(f"`{build}`: {', '.join(names) if place else 'all others'}" for place, (build, names) in
                       enumerate(sorted(builds.items(), key=lambda item: -len(item[1]))))
        lines += ["", f"Measured with {len(builds)} builds of the plug-in ({of})."]
    text = "\n".join(lines)
    print(text)
    fill_documents(out, "table", text)
    if not (out / "table.md").exists():
        (out / "table.md").write_text(f"<!-- table -->\n{text}\n<!-- /table -->\n")


def kld_and_perplexity(row):
    return f"{row['mean_kld']:.4f} ({row['perplexity_change_percent']:+.2f} %)" if row else "-"


def fit_table(find):
    """By how the scale of the normal levels is chosen."""
    lines = ["| scheme, changed part | norm | unbiased | lsq |", "|---|---|---|---|"]
    for scheme, cells in schemes.FITS.items():
        for part in ("keys", "values"):
            got = [find(cells[part, fit]) for fit in ("norm", "unbiased", "lsq")]
            lines.append(f"| {scheme}, {part} | " + " | ".join(map(kld_and_perplexity, got)) + " |")
    return "\n".join(lines)


def weights_table(find):
    lines = ["| scheme | f16 weights | q8_0 | Q4_1, as the file has them |", "|---|---|---|---|"]
    for scheme in schemes.WEIGHTS_SCHEMES:
        got = [find(scheme, weights=w) for w in WEIGHTS]
        lines.append(f"| {scheme} | " + " | ".join(f"{r['mean_kld']:.5f}" if r else "-" for r in got) + " |")
    return "\n".join(lines)


def search_table(find):
    lines = ["| searched | mean KLD (perplexity) |", "|---|---|"]
    return "\n".join(lines + [f"| {label} | {kld_and_perplexity(find(s))} |" for label, s in schemes.SEARCH])


def edges_table(find):
    lines = ["| scheme | mean KLD | with layers 0-1 and 28-29 as lowkv4 |", "|---|---|---|"]
    for plain, edges in schemes.EDGES:
        if find(plain) and find(edges):
            lines.append(f"| {plain} | " + " | ".join(
                f"{find(s)['mean_kld']:.4f}, {find(s)['kv_bytes'] / 2**20:.2f} MiB" for s in (plain, edges)) + " |")
    return "\n".join(lines)


def calibration_table(find):
    lines = ["| scheme | " + " | ".join(f"{c.split()[0]}, {int(c.split()[1]):,}" for c in schemes.CALIBRATIONS) + " |",
             "|---" * (1 + len(schemes.CALIBRATIONS)) + "|"]
    for scheme in schemes.CALIBRATIONS_SCHEMES:
        got = [find(scheme, calibration=c) for c in schemes.CALIBRATIONS]
        lines.append(f"| {scheme} | " + " | ".join(f"{r['mean_kld']:.4f}" if r else "-" for r in got) + " |")
    return "\n".join(lines)


def reference_table(find):
    """Ours beside the float32 reference's; the ratio is bold where it is off by more than a tenth."""
    lines = ["| reference row | its bits | its KLD | ours | our bits | our KLD | ratio | why |",
             "|---|---|---|---|---|---|---|---|"]
    for row in quality_reference.ROWS:
        if not (got := find(row.scheme, **row.setting)):
            continue
        ratio = got["mean_kld"] / row.kld
        near = 0.9 <= ratio <= 1.1
        said = f"{ratio:.2f}" if near else f"**{ratio:.2f}**"
        lines.append(f"| {row.label} | {row.bits:.2f} | {row.kld:.4f} | `{row.scheme.replace('+', ',')}` "
                     f"| {got['bits']:.2f} | {got['mean_kld']:.4f} | {said} | {'' if near else row.reason} |")
    return "\n".join(lines)

TABLES = {"fit": fit_table, "weights": weights_table, "search": search_table, "edges": edges_table,
          "calibration": calibration_table, "reference": reference_table}


def draw(out, sections, find):
    for name in sections:
        if name in TABLES:
            text = TABLES[name](find)
            print(f"\n{text}")
            fill_documents(out, name, text)
