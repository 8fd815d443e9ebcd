#!/bin/sh
python3 - > answer.txt <<'END'
import sqlite3

query = """
select name, sum(number * cents) as total from sales join products on products.id = product
where day like '2026-03-%' group by product order by total desc
"""
print(*sqlite3.connect("shop.db").execute(query).fetchone())
END
