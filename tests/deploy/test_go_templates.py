"""The renderer of the chart: white space, scopes and pipelines as Go's templates have them."""

from typing import Any

import pytest

from tests.deploy.go_templates import Templates


def rendered(text: str, data: dict[str, Any] | None = None, **defined: str) -> str:
    sources = {name: f'{{{{ define "{name}" -}}}}{body}{{{{- end }}}}' for name, body in defined.items()}
    return Templates({**sources, "file": text}).render("file", data or {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a {{ .x }} b", "a 1 b"),
        ("a {{- .x }} b", "a1 b"),
        ("a {{ .x -}} b", "a 1b"),
        ("a\n  {{- .x -}}\n b", "a1b"),
        ("{{ .x }} {{- .x }}", "11"),
        ("{{/* nothing */}}a", "a"),
        ("{{ .y.z }}", "deep"),
        ("{{ .yes }}", "true"),
        ('{{ .empty | default "other" }}', "other"),
        ('{{ default "other" .y.z }}', "deep"),
        ('{{ printf "%s-%s" .y.z "b" | trunc 5 | trimSuffix "-" }}', "deep"),
        ("{{ .y.z | quote }}", '"deep"'),
        ("{{ add .x 2 3 }}", "6"),
        ("k:\n  {{- toYaml .y | nindent 2 }}", "k:\n  z: deep"),
        ("{{ if .empty }}a{{ else }}b{{ end }}", "b"),
        ("{{ if .x }}a{{ end }}", "a"),
        ("{{ with .y }}{{ .z }}{{ $.x }}{{ end }}", "deep1"),
        ("{{ with .empty }}a{{ end }}", ""),
        ("{{ $n := .y.z }}{{ with .y }}{{ $n }}{{ end }}", "deep"),
        ('{{ if contains "ee" .y.z }}in{{ end }}', "in"),
        ('{{ include (print "na" "med") .y }}', "<deep>"),
    ],
)
def test_it_renders(text: str, said: str) -> None:
    data = {"x": 1, "y": {"z": "deep"}, "yes": True, "empty": ""}
    assert rendered(text, data, named="<{{ .z }}>") == said


@pytest.mark.parametrize(
    "text", ["{{ .none }}", "{{ lookup .x }}", '{{ required "say x" .x }}', "{{ if .x }}a{{ end }}{{ end }}"]
)
def test_what_it_does_not_know_is_an_error(text: str) -> None:
    with pytest.raises(AssertionError):
        rendered(text, {"x": ""})
