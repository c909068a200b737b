"""A client app that tells where it runs and how often it was asked, for the tests of warm processes."""

from __future__ import annotations

import os
import time

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()
asked = 0


@app.train()
def train(message: Message, context: Context) -> Message:
    """The array that came, and who answered for the how-manieth time."""
    global asked  # noqa: PLW0603 - what stays in the process is what is tested
    asked += 1
    config = message.content.config_records.get("config", ConfigRecord())
    match config.get("do"):
        case "fail":
            raise ValueError("the data of this site cannot be read")
        case "die":
            os._exit(3)
        case "sleep":
            time.sleep(60)
    before = context.state.config_records.get("kept", ConfigRecord({"visits": 0}))
    context.state["kept"] = ConfigRecord({"visits": int(str(before["visits"])) + 1, "raw": b"\0x"})
    told = MetricRecord({"pid": os.getpid(), "asked": asked, "node": context.node_id})
    return Message(
        RecordDict({"arrays": message.content["arrays"], "told": told}), reply_to=message
    )


def make_arrays(data: bytes) -> ArrayRecord:
    return ArrayRecord({"x": Array(dtype="uint8", shape=(len(data),), stype="raw", data=data)})


not_an_app = 3
