"""A taskset of verifiers: sums, scored by whether the last reply holds the result."""

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(str(self.data.answer) in (trace.assistant_messages[-1].content or ""))

    @vf.reward(weight=0.001)
    async def length(self, trace: vf.Trace) -> float:
        return float(trace.num_output_tokens)


class SumsTaskset(vf.Taskset[SumTask]):
    def load(self) -> list[SumTask]:
        return [
            SumTask(SumData(prompt=f"What is {i} + {2 * i}?", answer=3 * i), self.config.task) for i in range(4, 10)
        ]
