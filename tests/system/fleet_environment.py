"""The environment of the fleet's tests: two turns of eight tokens, a reward for a token of the second."""


class TwoTurns:
    def __init__(self, tokenizer) -> None:
        self._tokenizer = tokenizer

    async def run(self, session, task) -> None:
        session.prompt([1, 2, 3])
        await session.generate(max_new_tokens=8)
        session.observe([4, 5])
        session.finish(float((await session.generate(max_new_tokens=8))[0] > 3))
