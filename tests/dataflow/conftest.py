"""One small function in each language, with a loop, a branch and a comment."""

import pytest

FUNCTIONS = {
    "ruby": """def total(prices, rate = 2)
  sum = 0
  prices.each { |price| sum += price }
  sum = sum * rate if rate
  # the end
  sum
end""",
    "python": '''def total(prices, rate=2):
    """Add up."""
    sum = 0
    for price in prices:
        sum = sum + price  # grows
    if rate:
        sum *= rate
    else:
        sum = 1
    return sum
''',
    "java": """int total(int[] prices, int rate) {
    int sum = 0;
    for (int price : prices) { sum = sum + price; }
    // scale
    if (rate > 1) { sum = rate; }
    return sum;
}""",
    "javascript": """total(prices, rate = 2) {
  let sum = 0;
  while (rate) { sum += prices.pop(); rate--; }
  return sum; // done
}""",
    "php": """public function total($prices, $rate = 2) {
    $sum = 0;
    foreach ($this->prices as $key => $price) { $sum = $price; }
    if ($rate) { $sum = $rate; } else { $sum++; }
    return "sum $sum"; /* done */
}""",
    "go": """func Total(prices []int, rate int) int {
	var sum = 0
	for i := 0; i < rate; i++ {
		sum = sum + prices[i]
	}
	if rate > 1 { sum = rate } // scale
	return sum
}""",
}


@pytest.fixture(scope="session")
def functions() -> dict[str, str]:
    return FUNCTIONS
