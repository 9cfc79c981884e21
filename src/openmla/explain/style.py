"""The page's style sheet: light and dark, one color per kind of region."""

_LIGHT = {
    "page": "#f6f7f9",
    "paper": "#ffffff",
    "ink": "#1d2733",
    "soft": "#5b6b7b",
    "rule": "#d7dde4",
    "empty": "#e9edf2",
    "q": "#3b6fb6",
    "k": "#2a8074",
    "v": "#8a5a9e",
    "rope": "#6d8f2f",
    "mask": "#b0486f",
    "p": "#c0632f",
    "stats": "#946f1a",
    "barriers": "#5f6b78",
    "scratch": "#8a8f98",
    "qk": "#3b6fb6",
    "pv": "#a8466b",
    "today": "#1e7a4c",
    "planned": "#8a5a12",
}
_DARK = {
    "page": "#12161b",
    "paper": "#1a2027",
    "ink": "#e6ebf0",
    "soft": "#9fb0c0",
    "rule": "#313b46",
    "empty": "#28313b",
    "q": "#3f74bd",
    "k": "#2b8377",
    "v": "#8f5fa4",
    "rope": "#66872c",
    "mask": "#a8466b",
    "p": "#b85c2a",
    "stats": "#8c6a1c",
    "barriers": "#64717f",
    "scratch": "#7b828c",
    "qk": "#3f74bd",
    "pv": "#a8466b",
    "today": "#2f9461",
    "planned": "#a06c1c",
}
_KINDS = ("q", "k", "v", "rope", "mask", "p", "stats", "barriers", "scratch", "qk", "pv")


def _variables(colors: dict[str, str]) -> str:
    return "".join(f"--{name}:{color};" for name, color in colors.items())


CSS = (
    f":root{{{_variables(_LIGHT)}}}\n"
    f"@media (prefers-color-scheme: dark){{:root{{{_variables(_DARK)}}}}}\n"
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
 font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1040px;margin:0 auto;padding:32px 20px 64px}
h1{font-size:1.7rem;line-height:1.2;margin:0 0 .4em}
h2{font-size:1.15rem;margin:0 0 .3em}
p{margin:.3em 0;color:var(--soft)}
section{background:var(--paper);border:1px solid var(--rule);border-radius:12px;
 padding:20px;margin-top:20px}
figure{margin:14px 0 0}
.scroll{overflow-x:auto}
svg{display:block;width:100%;min-width:720px;height:auto}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:12px;
 margin:18px 0 0}
.card{background:var(--paper);border:1px solid var(--rule);border-radius:12px;padding:12px 14px}
dt{color:var(--soft);font-size:.8rem}
dd{margin:2px 0 0;font-weight:600}
.badge{display:inline-block;border-radius:999px;padding:1px 10px;color:#fff;font-size:.8rem;
 white-space:nowrap}
.today{background:var(--today)} .planned{background:var(--planned)}
ol{margin:10px 0 0;padding-left:1.6em} li{margin:.35em 0;overflow-wrap:anywhere}
table{border-collapse:collapse;width:100%;margin-top:12px;font-size:.92rem;min-width:760px}
th,td{text-align:left;padding:9px 12px 9px 0;border-top:1px solid var(--rule);vertical-align:top}
thead th{border-top:0;color:var(--soft);font-weight:500}
tr.here th{color:var(--today)}
small{display:block;color:var(--soft);max-width:34em}
.meter{position:relative;height:12px;width:210px;margin-top:6px}
.meter i,.meter b{position:absolute;left:0;top:0;height:100%;border-radius:3px}
.meter i{background:var(--empty)} .meter b{background:var(--k)}
.chart text{font-family:system-ui,-apple-system,"Segoe UI",sans-serif;fill:var(--ink)}
.chart .label{font-size:12px} .chart .figure{font-size:13px;font-weight:600}
.chart .note{font-size:11px;fill:var(--soft)}
.chart .inside{font-size:12px;fill:#fff} .chart .inside.small{font-size:11px}
.empty{fill:var(--empty)} .edge{stroke:var(--paper);stroke-width:1}
.axis{stroke:var(--soft);stroke-width:1}
"""
    + "\n".join(f".kind-{kind}{{fill:var(--{kind})}}" for kind in _KINDS)
    + "\n"
)
