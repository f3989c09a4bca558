"""What inference-perf reads by position is there, in time order, and is an Azure file to all others."""

from llmtap.traces.formats import azure
from llmtap.traces.formats.inference_perf import FORMAT
from tests.support.trace_files import read, rows, trace, write


def test_three_columns_of_six_digits_in_time_order() -> None:
    data = (
        b"TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\r\n"
        b"2025-01-01 00:00:01.1234567,1,10,20\r\n2025-01-01 00:00:00.5000000,0,30,40\r\n"
    )
    source, batches = read(azure.FORMAT, data)
    again, written = write(FORMAT, source.info, batches)
    assert again == (
        b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
        b"2025-01-01 00:00:00.500000,30,40\n2025-01-01 00:00:01.123456,10,20\n"
    )
    assert written.notes == ["1 arrivals lost what is finer than 6 digits of a second"]
    assert not FORMAT.sniff(again, "x.csv")
    assert azure.FORMAT.sniff(again, "x.csv")


def test_the_shared_trace_is_the_same_to_the_microsecond() -> None:
    data = trace("azure_llm_2023/AzureLLMInferenceTrace_code.rows_1_6000.csv.gz")
    source, batches = read(azure.FORMAT, data)
    assert FORMAT.read is not None
    again = read(FORMAT, write(FORMAT, source.info, batches)[0])[1]
    names = ("arrival_ns", "input_tokens", "output_tokens")
    assert [(t // 1_000, a, b) for t, a, b in rows(batches, *names)] == [
        (t // 1_000, a, b) for t, a, b in rows(again, *names)
    ]
