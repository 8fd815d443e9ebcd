"""python3 -m unittest checks.test_stock"""

import unittest

from stock import Store, parse_line, table


class Stock(unittest.TestCase):
    def test_stores_are_apart(self):
        Store().add("cup")
        self.assertEqual(Store().counts, {})

    def test_too_many_are_not_taken(self):
        store = Store({"cup": 1})
        with self.assertRaises(ValueError):
            store.take("cup", 2)
        self.assertEqual(store.counts, {"cup": 1})

    def test_a_line_has_names_of_several_words(self):
        self.assertEqual(parse_line("red cup: 12"), ("red cup", 12))

    def test_a_table_is_in_order(self):
        self.assertEqual(table(Store({"fork": 2, "cup": 10})), "cup : 10\nfork: 2")


if __name__ == "__main__":
    unittest.main()
