"""A web shop with a search, after AgentBench's (arXiv:2308.03688) and WebShop
(arXiv:2207.01206).

    rl-core train --env_path envs/agentbench_shop.py --model M --max_prompt_tokens 1024
    --max_tokens 256 --out runs/shop

The model calls `search` and `click`, as on pages: results, a product with its options, `Buy Now`,
which ends the episode. Reward, WebShop's: of the wanted attributes, options and the price limit,
the share that the bought product has; 0 for another category, and for buying nothing. Metric:
`bought`. Without --data.train: made-up products and wishes of 3 levels; a hash of the wish says
which tenth is held out. Rows: a prompt, `category`, `attributes`, `options` (name -> value),
`max_price`; products of your own: $SHOP_PRODUCTS, a JSON object a line with `name`, `category`,
`attributes`, `options` (name -> values), `price`. Needs a GPU, not run.
"""

import json
import os
import random
import re
import zlib

from programs.calling import answers, tool

from rl_core import reward

PAGE = 5
WORDS = {
    "shirt": ("cotton", "linen", "striped", "sleeveless"),
    "lamp": ("wooden", "dimmable", "foldable", "bright"),
    "mug": ("ceramic", "insulated", "large", "striped"),
    "bag": ("leather", "waterproof", "foldable", "large"),
}
OPTIONS = {"color": ("red", "blue", "green", "black"), "size": ("small", "medium", "large")}
max_turns = 12
tools = [
    tool("search", "Searches the shop and shows the first results.", keywords="words"),
    tool("click", "Clicks what stands in [brackets] on the page.", value="its text"),
]


def all_products():
    rng, products = random.Random(0), []
    for number in range(240):
        category = rng.choice([*WORDS])
        attributes = sorted(rng.sample(WORDS[category], 2))
        options = {"color": rng.sample(OPTIONS["color"], 2)}
        if category in ("shirt", "bag"):
            options["size"] = rng.sample(OPTIONS["size"], 2)
        name = f"{' '.join(attributes)} {category} {number:03}"
        products.append(
            {
                "name": name,
                "category": category,
                "attributes": attributes,
                "options": options,
                "price": rng.randrange(5, 100),
            }
        )
    return products


def read_products():
    path = os.environ.get("SHOP_PRODUCTS")
    if not path:
        return all_products()
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


PRODUCTS = {product["name"]: product for product in read_products()}


def load_tasks(split):
    """Wishes, each of which a product fulfils: for a price, attributes as well, options as well."""
    rng, rows, products = random.Random(1), {}, all_products()
    for number in range(900):
        level = number % 3 + 1
        product = rng.choice(products)
        row = {"category": product["category"], "level": level, "max_price": product["price"] + 5}
        row["attributes"] = product["attributes"] if level > 1 else []
        row["options"] = {}
        if level == 3:
            row["options"] = {name: rng.choice(of) for name, of in product["options"].items()}
        wish = [*row["attributes"], product["category"]]
        options = "".join(f", {name} {value}" for name, value in row["options"].items())
        row["prompt"] = f"Buy a {' '.join(wish)}{options}, for at most {row['max_price']} dollars."
        is_held_out = zlib.crc32(row["prompt"].encode()) % 10 == 0
        if is_held_out == (split != "train"):
            rows[row["prompt"]] = row
    return list(rows.values())


def words_of(text):
    return set(re.findall(r"[a-z0-9]+", text.lower()))


def found_by(keywords):
    """Names of products that share a word, those with the most first."""
    wanted = words_of(keywords[:500])
    scores = {name: len(wanted & words_of(name)) for name in PRODUCTS}
    return sorted((name for name in PRODUCTS if scores[name]), key=lambda name: -scores[name])


class Shop:
    """One visit: the page, the choices and the purchase."""

    def __init__(self):
        self.results = []
        self.first = 0
        self.product = None
        self.chosen = {}
        self.bought = None

    def page(self):
        """Text of the page and its clickable links."""
        if self.bought:
            return "Thank you.", []
        if self.product:
            choices = [value for values in self.product["options"].values() for value in values]
            text = f"{self.product['name']}, {self.product['price']} dollars. Chosen: {self.chosen}"
            return text, [*choices, "Buy Now", "Back"]
        end = self.first + PAGE
        names = self.results[self.first : end]
        lines = [f"{PRODUCTS[name]['price']} dollars: {name}" for name in names]
        if end < len(self.results):
            names = [*names, "Next"]
        return "\n".join(lines) or "Nothing was found.", names

    def shown(self):
        text, links = self.page()
        return "\n".join([text, *(f"[{link}]" for link in links)])

    def search(self, keywords):
        if self.bought:
            raise ValueError("you have bought already")
        self.results = found_by(keywords)
        self.first = 0
        self.product = None
        return self.shown()

    def click(self, value):
        if value not in self.page()[1]:
            raise ValueError(f"there is no [{value[:80]}] on this page")
        if value == "Buy Now":
            self.bought = self.product
        elif value == "Back":
            self.product = None
        elif value == "Next":
            self.first += PAGE
        elif self.product is None:
            self.product, self.chosen = PRODUCTS[value], {}
        else:
            options = self.product["options"].items()
            self.chosen |= {name: value for name, values in options if value in values}
        return self.shown()


def start(task):
    return Shop()


def interact(messages, state):
    replies = answers(messages[-1], {"search": state.search, "click": state.click})
    return {"messages": replies, "done": not replies or state.bought is not None}


def reward_fn(state, category, attributes, options, max_price):
    product = state.bought
    if product is None or product["category"] != category:
        return 0.0
    right = sum(attribute in product["attributes"] for attribute in attributes)
    right += sum(state.chosen.get(name) == value for name, value in options.items())
    right += product["price"] <= max_price
    return right / (len(attributes) + len(options) + 1)


@reward(weight=0)
def bought(state):
    return float(state.bought is not None)


def oracle(task):
    """Searches, opens the first product that fits, chooses its options and buys it."""
    shop, row = Shop(), task.row
    shop.search(" ".join([*row["attributes"], row["category"]]))
    names = [name for name in shop.results if is_fit(PRODUCTS[name], row)]
    while names[0] not in shop.page()[1]:
        shop.click("Next")
    for value in [names[0], *row["options"].values(), "Buy Now"]:
        shop.click(value)
    wish = {name: row[name] for name in ("category", "attributes", "options", "max_price")}
    return reward_fn(shop, **wish)


def is_fit(product, row):
    for name, value in row["options"].items():
        if value not in product["options"].get(name, ()):
            return False
    is_right = product["category"] == row["category"] and product["price"] <= row["max_price"]
    return is_right and {*row["attributes"]} <= {*product["attributes"]}
