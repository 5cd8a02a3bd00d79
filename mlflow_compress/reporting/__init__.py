"""What people read: verdict, tables, figures, one self-contained HTML page. Pure: results in, text and files out."""
