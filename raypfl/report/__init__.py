"""What runs show: tables that compare them, pictures, and a page with all of it."""
