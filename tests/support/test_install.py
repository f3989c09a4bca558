"""The lines of an installation, and the packages of an extra."""

from tests.support.install import Progress, packages_of


def test_the_lines_of_pip_become_steps() -> None:
    progress = Progress()
    steps = [
        ("Obtaining file:///home/me/llmtap", "preparing"),
        ("  Installing build dependencies: started", "installing the build tools"),
        ("Collecting uvloop>=0.23 (from -c constraints.txt (line 3))", "downloading uvloop"),
        ("  Downloading opentelemetry_sdk-1.45.0-py3-none-any.whl (1 kB)", "downloading opentelemetry_sdk"),
        ("Requirement already satisfied: rich>=13", "downloading opentelemetry_sdk"),
        ("Collecting python-dateutil==2.9", "downloading python-dateutil"),
        ("  Building editable for llmtap (pyproject.toml): started", "building llmtap"),
        ("Installing collected packages: uvloop, rich", "unpacking"),
    ]
    for line, step in steps:
        progress.read(f"{line}\n")
        assert progress.step == step
    assert progress.packages == 2


def test_an_extra_of_other_extras_is_expanded() -> None:
    packages = packages_of("dev")
    assert packages_of("ray")[0] in packages and packages_of("top")[0] in packages
    assert not [text for text in packages if text.startswith("llmtap")]
