from llmtap.channel.frames import BatchReader, FrameKind
from tests.support.traffic.tap_frames import Script


def test_a_script_packs_to_the_frames_it_holds() -> None:
    script = Script().hello().stream(1)
    frames = script.frames()
    ((number, unpacked),) = BatchReader().feed(script.pack(4))
    assert (number, list(unpacked)) == (4, frames)
    assert script.frames() == []
    assert [frame[0] for frame in frames[:3]] == [FrameKind.HELLO, FrameKind.OPEN, FrameKind.REQUEST_DATA]
    assert frames[-1][0] == FrameKind.CLOSE
