import random
import sqlite3

rng = random.Random(3)
base = sqlite3.connect("shop.db")
base.execute("create table products (id integer primary key, name text, cents integer)")
base.execute(
    "create table sales (id integer primary key, product integer, number integer, day text)"
)
for product, name in enumerate(["cup", "plate", "fork", "bowl", "jug"], 1):
    base.execute("insert into products values (?, ?, ?)", (product, name, rng.randrange(100, 900)))
for sale in range(300):
    day = f"2026-{rng.randrange(1, 5):02d}-{rng.randrange(1, 29):02d}"
    values = (sale, rng.randrange(1, 6), rng.randrange(1, 9), day)
    base.execute("insert into sales values (?, ?, ?, ?)", values)
base.commit()
