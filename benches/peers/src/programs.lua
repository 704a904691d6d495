local function fib(n)
  if n < 2 then return n end
  return fib(n - 1) + fib(n - 2)
end

function run_fib(n) return fib(n) end

function run_mandelbrot(n)
  local total = 0
  for y = 0, n - 1 do
    local ci = 2 * y / n - 1
    for x = 0, n - 1 do
      local cr = 2 * x / n - 1.5
      local zr, zi, i = 0.0, 0.0, 0
      while i < 100 and zr * zr + zi * zi < 4 do
        zr, zi = zr * zr - zi * zi + cr, 2 * zr * zi + ci
        i = i + 1
      end
      total = total + i
    end
  end
  return total
end

function run_table(n)
  local t, sum = {}, 0
  for i = 0, n - 1 do
    local key = i % 5000 * 1009
    t[key] = (t[key] or 0) + i
  end
  for _, value in pairs(t) do sum = sum + value end
  return sum
end

function run_host(n)
  local sum = 0
  for i = 0, n - 1 do sum = host_add(sum, i) end
  return sum
end
