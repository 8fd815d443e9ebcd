system_prompts = {"policy": "Be short."}


def reward_fn(messages):
    return 1.0
