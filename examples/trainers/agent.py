"""The agent that the trainers' examples share: any program that takes an OpenAI client and returns a reward."""


async def answer(client, question: str, expected: str) -> float:
    reply = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": question}], max_tokens=64)
    return float(expected in (reply.choices[0].message.content or ""))
