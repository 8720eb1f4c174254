-- The end of a call for the books of tenants: what requests gave back and what instances were given is entered, and
-- what changed is written.
local books = require('shared.books')
local budgets = require('shared.budgets')
local shares = require('shared.shares')
local kept, read_books, write_changes = books.kept, books.read_books, books.write_changes

-- Writes the books that this call changed, at its end.
local function write_books(at_ms)
  if kept.has_ends then
    local names = {}
    budgets.add_names_at_end(names)
    shares.add_names_at_end(names)
    read_books(names, at_ms)
    budgets.enter_given_back(at_ms)
    shares.enter_given_work()
    kept.has_ends = false
  end
  if kept.has_changes then
    shares.list_active(at_ms)
    write_changes(at_ms)
  end
end

return write_books
