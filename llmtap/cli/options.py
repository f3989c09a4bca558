"""Options that several commands have: single options, and structs of options that belong together.

The options of a load are in `llmtap/load/options.py`. `cli/flags.py` makes the flags from the structs.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct

from llmtap.cli.shared import Outputs, read_objectives, read_pairs
from llmtap.load.options import CaFile
from llmtap.metrics.deadlines import ALPHA, READER_NS_PER_TOKEN, Benefit
from llmtap.metrics.idle_cost import check_idle_cost
from llmtap.options.fields import keys_given, opt

if TYPE_CHECKING:
    from llmtap.config import LoadedSettings
    from llmtap.top.client import TopOptions

ConfigFile = Annotated[
    Path | None,
    opt(
        "TOML configuration file. An option with [key: NAME] sets that key; `llmtap proxy --keys` lists all "
        "keys.",
        envvar="LLMTAP_CONFIG",
    ),
]


class SettingsOptions(Struct, frozen=True, kw_only=True):
    """Options for the configuration file, and for those of its keys that several commands can set."""

    admin: Annotated[
        str | None,
        opt("HOST:PORT of the admin port with /metrics; default 127.0.0.1:9464.", key="meter.admin"),
    ] = None
    capture: Annotated[
        str | None,
        opt(
            "Folder or URL for a Parquet capture of every exchange (a request with its response), by "
            "default without prompts and answers.",
            "DIR|URL",
            key="capture.to",
        ),
    ] = None
    config: ConfigFile = None
    assign: Annotated[
        list[str] | None,
        opt(
            "Value of any configuration key, for example log.level=warning; may be repeated.",
            "KEY=VALUE",
            "--set",
        ),
    ] = None
    check: Annotated[bool, opt("Check the configuration and start nothing.")] = False

    def key_values(self, options: Struct) -> dict[str, Any]:
        """Return the configuration keys, with values, that are set by these flags and those of `options`."""
        return {**keys_given(options, self), **read_pairs("--set", self.assign)}

    def read(self, options: Struct) -> "LoadedSettings":
        """Return the settings, and all mistakes in their values. `options`: the command's other flags.

        Raises ConfigError if the file or a flag cannot be read.
        """
        from llmtap.config import read_settings

        return read_settings(self.config, os.environ, self.key_values(options))


ApiKeyEnv = Annotated[
    str | None, opt("Environment variable with the API key (default: OPENAI_API_KEY).", "NAME")
]
Require = Annotated[
    list[str] | None,
    opt(
        "Requirements on figures, for example 'attainment>=0.99 ttft_p99<=500ms error_rate<=1%'; may be "
        "repeated. Exit code 3 if one is missed, 4 if the figure of one is not valid. Figures: a metric "
        "with a statistic (ttft_p99, tpot_mean, e2e_p99.9), attainment, goodput, error_rate, refusal_rate, "
        "achieved_rps, output_tokens_per_second and others: docs/howto/ci.md.",
        "CONDITIONS",
        "--require",
    ),
]
NoSelftest = Annotated[
    bool,
    opt(
        "Skip the self-test, which measures how accurate llmtap's TTFT and ITL are at the same load.",
        None,
        "--no-selftest",
    ),
]
Json = Annotated[
    str | None, opt("Result as JSON: on stdout with --json, in FILE with --json=FILE.", "[=FILE]")
]
"""Option `--json` with an optional file. Without a file, `cli/main.py` adds `-`, which is standard output."""


class HeaderOptions(Struct, frozen=True, kw_only=True):
    """Options for the header fields of every request."""

    header: Annotated[
        list[str] | None, opt("Header field for every request; may be repeated.", "'NAME: VALUE'")
    ] = None
    header_file: Annotated[
        Path | None, opt("File with header fields, one 'NAME: VALUE' per line; for secrets.", "FILE")
    ] = None
    api_key_env: ApiKeyEnv = None

    def fields(self) -> list[tuple[str, str]]:
        """Return the names and values of the header fields. No message of a ConfigError contains a value."""
        from llmtap.load.replay.options import read_headers

        return read_headers(self.header or [], self.header_file, self.api_key_env)


Goodput = Annotated[
    str | None,
    opt("The limits of --slo in vLLM's form, in ms, for example ttft:200 tpot:50 e2el:30000.", "NAME:MS..."),
]


class GoalOptions(Struct, frozen=True, kw_only=True):
    """Options for the limits that requests or figures must meet, and for additional percentiles to report."""

    slo: Annotated[
        str | None,
        opt(
            "Limits that a request must meet to count as goodput, for example 'ttft:500ms tpot:50ms'. Other "
            "names: ttft_any, ttfb, e2e, user_idle, tbc_max, tbc_p99, jitter; of a load also ttft_scheduled "
            "and e2e_scheduled, from the scheduled time.",
            "BOUNDS",
        ),
    ] = None
    goodput: Goodput = None
    require: Require = None
    percentiles: Annotated[
        str | None, opt("Additional percentiles of each metric, for example 25,75,99.5.", "N,...")
    ] = None

    def objectives(self) -> str | None:
        """Return the limits of `--slo` or `--goodput` in the form of `--slo`. Raises ConfigError."""
        return read_objectives(self.slo, self.goodput)


class TokenOptions(Struct, frozen=True, kw_only=True):
    """Options for access to the admin port of a running llmtap."""

    token_env: Annotated[
        str | None,
        opt("Environment variable with the token of the admin port (default: LLMTAP_ADMIN_TOKEN).", "NAME"),
    ] = None
    token_file: Annotated[
        Path | None, opt("File with the token, as an alternative to --token-env.", "FILE")
    ] = None
    ca: CaFile = None

    def connection(self, admin: str, **more: str) -> "TopOptions":
        """Return the options of a client of this admin port. Raises ConfigError."""
        from llmtap.top.client import TopOptions, read_token

        token = read_token(name=self.token_env, file=self.token_file)
        return TopOptions(admin=admin, token=token, ca=self.ca, **more)


class ReaderOptions(Struct, frozen=True, kw_only=True):
    """Options for the assumed reader, whose speed decides user idle latency and smooth goodput."""

    reader_speed: Annotated[
        Annotated[float, Meta(gt=0, le=1e6)] | None,
        opt("Reading speed for user idle latency and smooth goodput; default 20.", "TOKENS/S"),
    ] = None
    alpha: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        opt(
            "Number of tokens that smooth goodput subtracts for each unit of waiting (see --idle-cost); "
            "default 5.",
            "NUMBER",
        ),
    ] = None
    idle_cost: Annotated[
        str | None,
        opt(
            "Unit in which --alpha counts waiting: seconds (default), the tokens that could have been read "
            "in that time, their percent of the answer's tokens, or an expression of l (s), V (s per token) "
            "and n (output tokens), such as '100 * l / (l + V * n)'.",
            "FUNCTION",
        ),
    ] = None
    reader_grace: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        opt(
            "Delay that a reader accepts before a token counts as late, in reading times of one token: 2 is "
            "100 ms at 20 tokens/s. It begins when the reader needs the token; default 0.",
            "TOKENS",
        ),
    ] = None

    def benefit(self) -> Benefit:
        """Return the reader's settings, with the defaults. Raises ConfigError."""
        speed = 1e9 / READER_NS_PER_TOKEN if self.reader_speed is None else self.reader_speed
        alpha = ALPHA if self.alpha is None else self.alpha
        idle_cost = "seconds" if self.idle_cost is None else self.idle_cost
        check_idle_cost(idle_cost, "--idle-cost")
        return Benefit.at_speed(speed, alpha, idle_cost, self.reader_grace or 0)


class OutputOptions(Struct, frozen=True, kw_only=True):
    """Options for the files to which a result is written."""

    json: Json = None
    html: Annotated[str | None, opt("File for an HTML report with charts; - is stdout.", "FILE")] = None
    markdown: Annotated[str | None, opt("File for the full report as Markdown; - is stdout.", "FILE")] = None

    def outputs(self, csv: str | None = None) -> Outputs:
        """Return the files, after a check that they can be written. Raises ConfigError."""
        return Outputs(json=self.json, html=self.html, markdown=self.markdown, csv=csv)
