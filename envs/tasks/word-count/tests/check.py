"""The reward is 1 if the program counts these texts right."""

from programs import output, write_reward

CASES = [
    ("2", "Tea, tea and TEA; and sugar.", "tea 3\nand 2\n"),
    ("3", "b a c\nc b a", "a 2\nb 2\nc 2\n"),
    ("1", "don't don t", "don 2\n"),
    ("5", "", ""),
    ("4", "x1x2y_y\tz " * 3, "x 6\ny 6\nz 3\n"),
]

printed = [output("python3", "/app/words.py", number, text=text) for number, text, _ in CASES]
write_reward(printed == [expected for *_, expected in CASES])
