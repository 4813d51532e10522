"""Starts Miles' session server for a Qwen3 model: `python miles_server.py ENGINE PORT MODEL`. GET /rows/ID returns the samples
that the server assembles for its trainer."""

import sys
from argparse import Namespace

import uvicorn
from fastapi.routing import APIRoute
from miles.rollout.session.samples.codec import decode_samples_and_merge_input_sample
from miles.rollout.session.server import SessionServer
from miles.utils.chat_template_utils.tito_tokenizer import resolve_fixed_chat_template
from miles.utils.types import Sample


def main(engine: str, port: str, model: str) -> None:
    template, more = resolve_fixed_chat_template("qwen3")
    args = Namespace(
        hf_checkpoint=model, chat_template_path=template, apply_chat_template_kwargs=more, tito_model="qwen3",
        use_session_server=True, sglang_speculative_algorithm=None, save_debug_trajectory_data=None,
    )  # fmt: skip
    server = SessionServer(args, engine)
    collect = next(r.endpoint for r in server.app.routes if isinstance(r, APIRoute) and r.path.endswith("/samples"))

    class Empty:
        async def body(self) -> bytes:
            return b""

    async def rows(name: str) -> list:
        answer = await collect(Empty(), name)
        if answer.status_code != 200:
            raise ValueError(answer.body.decode())
        out = []
        for sample in decode_samples_and_merge_input_sample(answer.body, Sample()).samples:
            given = len(sample.tokens) - sample.response_length
            logprobs = [None] * given + list(sample.rollout_log_probs)
            mask = [0] * given + [int(one) for one in sample.loss_mask]
            out.append({"ids": list(sample.tokens), "mask": mask, "logprobs": logprobs})
        return out

    server.app.add_api_route("/rows/{name}", rows)
    uvicorn.run(server.app, host="127.0.0.1", port=int(port), log_level="warning")


main(*sys.argv[1:])
